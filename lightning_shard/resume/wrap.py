"""Which loaders can be resumed, by what, and what is said of the others; streams; ranks with different lengths."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard.errors import DataError
from lightning_shard.ranks import Ranks
from lightning_shard.resume.loader import Draws, ResumableLoader
from lightning_shard.resume.shape import Delegating, DelegatingLoader, has_state, length_of


class StatefulIterableLoader(DelegatingLoader):
    """Carries the ``state_dict`` of the dataset, or of `inner` itself, as it was after the last batch trained on.
    Making an iterator draws nothing from the global generators, so that it may be made before or after a checkpoint's
    are set; a dataset that draws from them must keep what it drew in its state. A training loop that can't know the
    length fetches one batch ahead: `lookahead` is 1 for a loader without a length, else 0; 0 for a loop that takes
    batches as it uses them.
    """

    _own = frozenset({"lookahead", "_world_size", "_history", "_ended", "_spent", "_stateful", "_first"})

    def __init__(self, inner: DataLoader[Any], *, world_size: int, source: Any) -> None:
        super().__init__(inner)
        self._stateful = source
        # Hugging Face's begin every iteration at what was loaded, unless they were told of another epoch.
        hugging_face = type(source).__module__ == "datasets.iterable_dataset"
        self._first = copy.deepcopy(source.state_dict()) if hugging_face else None
        self.lookahead = int(length_of(inner) is None)
        self._world_size = world_size
        # (batches, dataset state) after the last batches given out, oldest first.
        self._history: list[tuple[int, Any]] = []
        self._ended = self._spent = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's; a stream is each rank's own, so all ranks' must be in the checkpoint."""
        if not self._history:
            batches, dataset = 0, self._dataset_state()
        else:
            # Once the end was met, nothing is ahead of the training loop.
            back = 1 if self._ended else 1 + self.lookahead
            batches, dataset = self._history[-min(back, len(self._history))]
        reached = {"batches": batches, "samples": batches, "finished": self._ended}
        return {"kind": "iterable", "dataset": dataset, **reached, "world_size": self._world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the dataset its state; warns at another world size, where only the dataset knows what it means."""
        if "kind" not in state:  # the loader's own, of before
            state = {"world_size": self._world_size, "dataset": state, "batches": 0, "finished": False}
        if state["world_size"] != self._world_size:
            warnings.warn(
                f"the state of {type(self._stateful).__name__} was written by {state['world_size']} processes, each"
                f" with a stream of its own, and is resumed on {self._world_size}: what was seen is not known in"
                " common, samples may be repeated or missed",
                stacklevel=2,
            )
        begins = self._first is not None and state["finished"]
        self._stateful.load_state_dict(copy.deepcopy(self._first if begins else state["dataset"]))
        self._history = [(0 if state["finished"] else state["batches"], copy.deepcopy(state["dataset"]))]
        self._ended, self._spent = False, state.get("spent", False)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._spent:
            self._ended, self._spent = True, False
            return iter(())
        # A state that was loaded and not used yet is where this iteration starts.
        if len(self._history) != 1 or self._ended:
            if self._first is not None:
                self._stateful.load_state_dict(copy.deepcopy(self._first))
            self._history = [(0, self._first or self._dataset_state())]
        self._ended = False
        return self._batches(self._history)

    def _batches(self, history: list[tuple[int, Any]]) -> Iterator[Any]:
        before = torch.get_rng_state()
        batches = iter(self._inner)
        torch.set_rng_state(before)
        for batch in batches:
            history.append((history[-1][0] + 1, self._dataset_state()))
            del history[: -(1 + max(1, self.lookahead))]
            yield batch
        if history is self._history:
            # Its state may have been set back at its end.
            history.append((history[-1][0], self._dataset_state()))
            self._ended = True

    def _dataset_state(self) -> Any:
        before = torch.get_rng_state()  # of which torchdata's loader draws a seed when it is asked for its state
        # Datasets tend to give the very dictionary that they go on to change.
        state = copy.deepcopy(self._stateful.state_dict())
        torch.set_rng_state(before)
        return state


def resumable(
    dataloader: Any, *, world_size: int, rank: int, inner_sampler: Any = None, draws: Draws | None = None
) -> Any:
    """The training `dataloader`, whose sampler is the one to train with, with ``state_dict`` and ``load_state_dict``;
    as it is if it has these, can't be resumed (:func:`order_warning`), or is no DataLoader.
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader, ResumableLoader | StatefulIterableLoader):
        return dataloader
    dataset = dataloader.dataset
    torchdata = any(cls.__module__.startswith("torchdata.stateful_dataloader") for cls in type(dataloader).__mro__)
    iterable = isinstance(dataset, IterableDataset)
    if has_state(dataloader) and not (torchdata and not iterable and not has_state(dataset)):
        if not torchdata and length_of(dataloader) is not None:
            return dataloader
        return StatefulIterableLoader(dataloader, world_size=world_size, source=dataloader)
    if not iterable:
        return ResumableLoader(dataloader, world_size, rank, inner_sampler, draws)
    if has_state(dataset) and dataloader.num_workers == 0:
        return StatefulIterableLoader(dataloader, world_size=world_size, source=dataset)
    return dataloader


def order_warning(loader: Any, *, saved: bool = True) -> str | None:
    """Why the order of what :func:`resumable` gave is not restored on resume; None if it is. Not ``saved``: the
    checkpoint is of another library, and of the middle of an epoch.
    """
    if isinstance(loader, ResumableLoader):
        if not saved:
            return (
                "The checkpoint is of the middle of an epoch, and was saved without this package: where its dataloader"
                " was is not known. The epoch goes on with its first batches, for as many as were left. Resume from a"
                " checkpoint of an epoch's end to see each sample once."
            )
        if loader.num_workers > 0 and not loader.in_order:
            return (
                "DataLoader(in_order=False): workers deliver batches in an order that is not repeatable, so that a"
                " resumed run can repeat or miss some of them. Set in_order=True to resume exactly."
            )
        return None
    if has_state(loader):
        return None
    name = type(getattr(loader, "dataset", loader)).__name__
    return (
        f"{name} is iterable and has no state_dict(), or in worker processes alone: on resume its order is not"
        " restored, it starts from its beginning. Give the loader, or with num_workers=0 the dataset, state_dict() and"
        " load_state_dict() to go on where it was (MosaicML's StreamingDataLoader and torchdata's StatefulDataLoader"
        " have them)."
    )


_FAILED, _OUT, _HAS = -1, 0, 1


def check_lengths(length: int | None, *, what: str = "training dataloader") -> None:
    """Refuse sized loaders whose numbers of batches differ between ranks. All ranks call it, with None of a loader
    without one. The DataError has a table of rank and batches.
    """
    lengths = Ranks.of().gather(length)
    if len(set(lengths)) == 1:
        return
    counts = ["no length" if count is None else f"{count} batches" for count in lengths]
    table = "\n".join(f"  rank {rank}: {count}" for rank, count in enumerate(counts))
    raise DataError(
        f"the {what} has different numbers of batches on different ranks:\n{table}\n"
        "All ranks must make the same number of steps, or those with more wait for the others for ever. Give every"
        " rank equally many samples: keep Trainer(use_distributed_sampler=True) or use a DistributedSampler, set"
        " drop_last=True, or set Trainer(limit_train_batches=...) to at most the smallest number above."
    )


def check_some(length: int, *, what: str = "predict dataloader") -> None:
    """Refuse a loader without a batch on some ranks only (DataError, naming those ranks). All ranks call it."""
    lengths = Ranks.of().gather(length)
    empty = [rank for rank, count in enumerate(lengths) if count == 0]
    if empty and len(empty) < len(lengths):
        raise DataError(
            f"the {what} has no batch on {_ranks(empty)}, {_ranks(_others(empty, lengths))} have some. A rank without "
            "batches leaves the loop before it began, and the others wait for it for ever. Give every rank at least "
            "one batch: use fewer processes, or a smaller batch_size."
        )


def agreed(iterator: Iterator[Any], *, what: str = "training dataloader") -> Iterator[Any]:
    """Go on for as long as every rank has a next batch. All ranks iterate over it: one all-reduce of an integer on the
    host per batch. When ranks run out at different batches, all end after the same one, with a warning on every rank
    that names those that ran out. An iterator's error is a DataError on the other ranks, which names its rank.
    """
    ranks = Ranks.of()
    if ranks.size == 1:
        yield from iterator
        return
    count = 0
    while True:
        batch, failure = None, None
        try:
            batch, status = next(iterator), _HAS
        except StopIteration:
            status = _OUT
        except Exception as error:
            status, failure = _FAILED, error
        lowest = torch.tensor(status)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=ranks.group)
        if lowest.item() == _HAS:
            count += 1
            yield batch
            continue
        statuses = ranks.gather(status)
        if failure is not None:
            raise failure
        failed = [rank for rank, other in enumerate(statuses) if other == _FAILED]
        if failed:
            raise DataError(
                f"the {what} raised on {_ranks(failed)} after {count} batches; all ranks end here. The cause is in"
                " the traceback of that rank."
            )
        out = [rank for rank, other in enumerate(statuses) if other == _OUT]
        if len(out) < len(statuses):
            warnings.warn(
                f"the {what} ran out on {_ranks(out)} after {count} batches, {_ranks(_others(out, statuses))} had"
                " more: all ranks end the epoch here. Give every rank equally much data to use all of it.",
                stacklevel=2,
            )
        return


def agreeing(loader: Any, *, what: str = "training dataloader") -> Any:
    """The `loader`, without a length, whose iterators are :func:`agreed`, with its attributes and state."""
    # A state is looked for in the class.
    names = ("state_dict", "load_state_dict") if has_state(loader) else ()
    state = {name: staticmethod(getattr(loader, name)) for name in names}
    bases = [_Agreeing] + [DelegatingLoader] * isinstance(loader, DataLoader)
    return type("AgreeingLoader", tuple(bases), state)(loader, what)


class _Agreeing(Delegating):
    _own = frozenset({"_what"})

    def __init__(self, inner: Any, what: str) -> None:
        super().__init__(inner)
        self._what = what

    def __iter__(self) -> Iterator[Any]:
        return agreed(iter(self._inner), what=self._what)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _others(ranks: list[int], statuses: list[int]) -> list[int]:
    return [rank for rank in range(len(statuses)) if rank not in ranks]
