"""Resumable loaders and warnings for others, stateful streams, and loaders whose lengths differ between ranks."""

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
    """Has the ``state_dict`` of `source`, the dataset or `inner` itself, after the last batch that was trained on.

    An iterator can be made before or after a checkpoint's generators are restored, since that draws nothing from the
    global ones. A dataset that draws from them must keep the numbers in its state. `lookahead` is the number of batches
    that the training loop fetches ahead: 1 without a length, else 0.
    """

    _own = frozenset({"lookahead", "_world_size", "_history", "_ended", "_spent", "_stateful", "_first"})

    def __init__(self, inner: DataLoader[Any], *, world_size: int, source: Any) -> None:
        super().__init__(inner)
        self._stateful = source
        # Hugging Face's datasets begin every iteration at the loaded state until another epoch is set.
        hugging_face = type(source).__module__ == "datasets.iterable_dataset"
        self._first = copy.deepcopy(source.state_dict()) if hugging_face else None
        self.lookahead = int(length_of(inner) is None)
        self._world_size = world_size
        # (batches, dataset state) after the last batches given out, oldest first.
        self._history: list[tuple[int, Any]] = []
        self._ended = self._spent = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Each rank has its own stream, so a checkpoint needs all ranks' states."""
        if not self._history:
            batches, dataset = 0, self._dataset_state()
        else:
            # After the end no batch is ahead of the training loop.
            back = 1 if self._ended else 1 + self.lookahead
            batches, dataset = self._history[-min(back, len(self._history))]
        reached = {"batches": batches, "samples": batches, "finished": self._ended}
        return {"kind": "iterable", "dataset": dataset, **reached, "world_size": self._world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the dataset its state. Warns at another world size, which only the dataset can interpret."""
        if "kind" not in state:  # written by the loader itself
            state = {"world_size": self._world_size, "dataset": state, "batches": 0, "finished": False}
        if state["world_size"] != self._world_size:
            warnings.warn(
                f"the state of {type(self._stateful).__name__} was written by {state['world_size']} processes, each"
                f" with a stream of its own, and is resumed on {self._world_size}: samples may be repeated or missed",
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
        # This iteration starts at a loaded state that was not used yet.
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
            # The dataset may have reset its state at its end.
            history.append((history[-1][0], self._dataset_state()))
            self._ended = True

    def _dataset_state(self) -> Any:
        before = torch.get_rng_state()  # torchdata's loader draws a seed from it in state_dict
        # Datasets tend to return the dictionary that they go on to change.
        state = copy.deepcopy(self._stateful.state_dict())
        torch.set_rng_state(before)
        return state


def resumable(
    dataloader: Any, *, world_size: int, rank: int, inner_sampler: Any = None, draws: Draws | None = None
) -> Any:
    """Wrap the training `dataloader`, which has its final sampler, with ``state_dict`` and ``load_state_dict``.
    Returned as it is: a loader that has these, can't be resumed (:func:`order_warning`), or is no DataLoader.
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
    """The reason that the order of a loader of :func:`resumable` is not restored, or None. ``saved`` is false for a
    checkpoint of another library from the middle of an epoch.
    """
    if isinstance(loader, ResumableLoader):
        if not saved:
            return (
                "The checkpoint is of the middle of an epoch, and was saved without this package: the place of its"
                " dataloader is not known. The epoch goes on with its first batches, as many as were left. Resume from"
                " a checkpoint of an epoch's end to see each sample once."
            )
        if loader.num_workers > 0 and not loader.in_order:
            return (
                "DataLoader(in_order=False): workers deliver batches in an order that can't be repeated, so that a"
                " resumed run can repeat or miss some of them. Set in_order=True to resume exactly."
            )
        return None
    if has_state(loader):
        return None
    name = type(getattr(loader, "dataset", loader)).__name__
    return (
        f"{name} is iterable and has no state_dict(), or in worker processes alone: on resume its order is not"
        " restored, it starts from its beginning. Give the loader, or with num_workers=0 the dataset, state_dict() and"
        " load_state_dict() to go on at its place (MosaicML's StreamingDataLoader and torchdata's StatefulDataLoader"
        " have them)."
    )


_FAILED, _OUT, _HAS = -1, 0, 1


def check_lengths(length: int | None, *, name: str = "training dataloader") -> None:
    """Refuse loaders whose numbers of batches differ between ranks (DataError). All ranks call it, with None for a
    loader without a length.
    """
    lengths = Ranks.of().gather(length)
    if len(set(lengths)) == 1:
        return
    counts = [f"rank {rank}: {'no length' if count is None else count}" for rank, count in enumerate(lengths)]
    raise DataError(
        f"the {name} has different numbers of batches on different ranks ({', '.join(counts)}). All ranks must make "
        "the same number of steps, or those with more wait for the others for ever. Give every rank equally many "
        "samples: keep Trainer(use_distributed_sampler=True) or use a DistributedSampler, set drop_last=True, or set "
        "Trainer(limit_train_batches=...) to at most the smallest number."
    )


def check_some(length: int, *, name: str = "predict dataloader") -> None:
    """Refuse a loader without a batch on some ranks only. The DataError names the ranks. All ranks call it."""
    lengths = Ranks.of().gather(length)
    empty = [rank for rank, count in enumerate(lengths) if count == 0]
    if empty and len(empty) < len(lengths):
        raise DataError(
            f"the {name} has no batch on {_ranks(empty)} of {len(lengths)}. A rank without batches leaves the loop at "
            "once, and the others wait for it for ever. Give every rank at least one batch: use fewer processes, or a "
            "smaller batch_size."
        )


def stop_together(iterator: Iterator[Any], *, name: str = "training dataloader") -> Iterator[Any]:
    """Yield batches while every rank has a next one. All ranks iterate over it: one all-reduce of an integer on the
    host per batch. If ranks run out at different batches, all end after the same one, and a warning on every rank names
    the ranks that ran out. An iterator's error is a DataError on the other ranks, which names its rank.
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
                f"the {name} raised on {_ranks(failed)} after {count} batches; all ranks end here. The cause is in"
                " the traceback of that rank."
            )
        out = [rank for rank, other in enumerate(statuses) if other == _OUT]
        if len(out) < len(statuses):
            warnings.warn(
                f"the {name} ran out on {_ranks(out)} of {ranks.size} after {count} batches: all ranks end the epoch"
                " here. Give every rank equally much data to use all of it.",
                stacklevel=2,
            )
        return


def stop_together_loader(loader: Any, *, name: str = "training dataloader") -> Any:
    """The `loader`, without a length, with its attributes and state, whose iterators :func:`stop_together`."""
    # Lightning looks for a state in the class.
    methods = ("state_dict", "load_state_dict") if has_state(loader) else ()
    state = {method: staticmethod(getattr(loader, method)) for method in methods}
    bases = [StopTogetherLoader] + [DelegatingLoader] * isinstance(loader, DataLoader)
    return type("StopTogetherLoader", tuple(bases), state)(loader, name)


class StopTogetherLoader(Delegating):
    _own = frozenset({"_name"})

    def __init__(self, inner: Any, name: str) -> None:
        super().__init__(inner)
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        return stop_together(iter(self._inner), name=self._name)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
