"""The shape of an epoch (samples over ranks and batches), checks of interrupted epochs, and wrappers.

A *position* counts samples of the epoch's global order, as a single process would see it. Rank r of w sees every w-th
sample from the r-th on, as with ``DistributedSampler``: k samples on each rank are the first k * w.
"""

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_shard.errors import DataError
from lightning_shard.resume.rng import of_library


def share_size(length: int, start: int, world_size: int, *, drop_last: bool) -> int:
    """Samples of each rank out of `length` after the position `start`."""
    left = max(0, length - start)
    return left // world_size if drop_last else -(-left // world_size)


def rank_share(order: Sequence[int], start: int, rank: int, world_size: int, *, drop_last: bool) -> list[int]:
    """Samples of ``order[start:]`` for `rank`, as by DistributedSampler: padded, or cut with `drop_last`."""
    total = share_size(len(order), start, world_size, drop_last=drop_last) * world_size
    rest = list(order[start : start + total])
    missing = total - len(rest)
    if missing:
        rest += (list(order) * -(-missing // len(order)))[:missing]
    return rest[rank::world_size]


def is_distributed(sampler: Any) -> bool:
    """Whether `sampler` divides one order over all ranks by DistributedSampler's own code, not a user's subclass."""
    dealing = next((cls for cls in type(sampler).__mro__ if "__iter__" in vars(cls)), object)
    return isinstance(sampler, DistributedSampler) and of_library(dealing)


def of_all_ranks(sampler: DistributedSampler[Any], seed: int, shuffle: bool) -> DistributedSampler[Any]:
    """A copy that gives the epoch's order of all ranks, not padded or cut."""
    single = copy.copy(sampler)
    single.seed, single.shuffle, single.num_replicas, single.rank = seed, shuffle, 1, 0
    # Typed through the dataset protocol, which has no length there.
    single.num_samples = single.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return single


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of an epoch. Positions count samples of all replicas together, or batches of kind "batches". Kinds:
    "distributed" (one order, divided over all ranks), "local" (each rank's own), "batches" (a custom batch sampler).
    """

    kind: str
    length: int | None  # Of the full order, None if the sampler has none.
    replicas: int
    drop_samples: bool
    batch_size: int
    drop_batch: bool

    def position(self, start: int, batches: int) -> int:
        if self.length is None:
            return start + batches * self.batch_size
        share = share_size(self.length, start, self.replicas, drop_last=self.drop_samples)
        return min(self.length, start + min(batches * self.batch_size, share) * self.replicas)

    def batches_left(self, start: int) -> int | None:
        if self.length is None:
            return None
        share = share_size(self.length, start, self.replicas, drop_last=self.drop_samples)
        return share // self.batch_size if self.drop_batch else -(-share // self.batch_size)


def stock_type(sampler: Any) -> type:
    """Class of a sampler, for torchdata's replacements the class of torch."""
    cls = type(sampler)
    if cls.__module__ == "torchdata.stateful_dataloader.sampler":
        return {"BatchSampler": BatchSampler, "RandomSampler": RandomSampler}.get(cls.__name__, cls)
    return cls


def shape_of(sampler: Any, batch_sampler: Any) -> Shape:
    if batch_sampler is not None and stock_type(batch_sampler) is not BatchSampler:
        length = length_of(batch_sampler)
        return Shape(kind="batches", length=length, replicas=1, drop_samples=False, batch_size=1, drop_batch=False)
    distributed = is_distributed(sampler)
    return Shape(
        kind="distributed" if distributed else "local",
        length=length_of(sampler.dataset if distributed else sampler),
        replicas=sampler.num_replicas if distributed else 1,
        drop_samples=bool(distributed and sampler.drop_last),
        batch_size=1 if batch_sampler is None else batch_sampler.batch_size,
        drop_batch=False if batch_sampler is None else batch_sampler.drop_last,
    )


def is_midway(state: dict[str, Any]) -> bool:
    """Whether `state` is from an interrupted epoch, whose loader may be used up ("spent")."""
    return state["samples"] > 0 and (not state["finished"] or state.get("spent", False))


def refuse_other_data(state: dict[str, Any], shape: Shape, world_size: int, order: Mapping[str, Any]) -> None:
    """DataError: the interrupted epoch of `state` can't be finished by a loader of `shape` and `order` ("seed",
    "shuffle").
    """
    found = {"sampler": (KINDS[state["kind"]], KINDS[shape.kind]), "length": (state["length"], shape.length)}
    if shape.kind != "distributed":
        found["number of processes"] = state["world_size"], world_size
        found |= {name: (state[name], own) for name, own in order.items() if None not in (own, state[name])}
    if other := [f"its {name} was {before} and is {here}" for name, (before, here) in found.items() if before != here]:
        raise DataError(
            f"the checkpoint was written in the middle of an epoch that this loader can't finish: {', '.join(other)}. "
            "Resume with the data, the sampler and the number of processes that it was written with, or from a "
            "checkpoint of an epoch's end. With Trainer(use_distributed_sampler=True) and no batch sampler any number "
            "of processes can go on."
        )


KINDS = {
    "distributed": "a distributed sampler",
    "local": "a sampler of each process's own",
    "batches": "a batch sampler of its own kind",
    "iterable": "an iterable dataset",
}


def length_of(collection: Any) -> int | None:
    try:
        return len(collection)
    except (TypeError, NotImplementedError):
        return None


class Delegating:
    """Has every attribute of `inner`, dunder methods aside, and sets attributes on it unless `_own` names them."""

    _own: frozenset[str] = frozenset()

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        # Neither this object nor its class has the name. Before __init__ (copy, pickle) there is no inner.
        if name == "_inner" or name in self._own or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        return len(self._inner)


class DelegatingLoader(Delegating, DataLoader[Any]):
    """A DataLoader for ``isinstance`` only: the constructor is not called, and the subclass iterates. Attributes that
    frameworks read and set, such as ``worker_init_fn`` and ``_iterator``, are `inner`'s.
    """


def has_state(thing: Any) -> bool:
    """Whether it has ``load_state_dict`` and ``state_dict()`` without arguments, which MosaicML's datasets require."""
    own = getattr(thing, "state_dict", None)
    if not callable(own) or not callable(getattr(thing, "load_state_dict", None)):
        return False
    try:
        inspect.signature(own).bind()
    except TypeError:
        return False
    return True
