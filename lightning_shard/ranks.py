"""Exchange of objects between ranks, and errors that are the same on all ranks.

No other module sends objects between ranks, except the comparison before the process group exists
(`lightning_shard.cluster.preflight`).
"""

import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard import errors
from lightning_shard.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


_ALONE = ContextVar("alone", default=False)


@contextmanager
def alone() -> Generator[None, None, None]:
    """Inside, `Ranks.of` has this process alone, so that nothing waits for other ranks."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that decide together. Without a process group it is this process alone."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> "Ranks":
        """The ranks of ``group``, with a CPU backend. None: the default group, or a gloo group of all ranks."""
        if _ALONE.get() or not (dist.is_available() and dist.is_initialized()):
            return Ranks(group=None, rank=0, size=1)
        if group is None:
            default = dist.group.WORLD
            assert default is not None
            group = default if _has_cpu_backend(default) else _own_group("cpu")
        elif not _has_cpu_backend(group):
            raise CheckpointError(
                "the process group given for a checkpoint has no CPU backend: give a gloo group, or none"
            )
        return Ranks(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))

    @staticmethod
    def in_background() -> "Ranks":
        """All ranks over a gloo group for a background thread. The first call makes it, and is a collective."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks.of()
        return Ranks.of(_own_group("background"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank, on every rank. Values are pickled. All ranks call it."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The ``value`` of rank ``source`` of this group, on every rank. All ranks call it."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, source), group=self.group)
        return box[0]

    def same(self, digest: bytes, timeout: timedelta | None = None) -> bool:
        """Whether all ranks give the same ``digest``, by one collective of twice its size. All ranks call it, with
        digests of one size. RuntimeError: another rank did not call it within ``timeout``.
        """
        if self.group is None:
            return True
        # The bytes are equal if the maximum equals the minimum.
        extremes = torch.frombuffer(bytearray(digest + bytes(255 - byte for byte in digest)), dtype=torch.uint8)
        work: Any = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        work.wait(*() if timeout is None else (timeout,))
        most, least = extremes.chunk(2)
        return bool((most == 255 - least).all())

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def exchange(self, doing: str, step: Callable[[], T], decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Run ``step`` on every rank, pass all results to ``decide`` on rank 0, and return its decision for this rank.

        If ``step`` fails on any rank, or ``decide`` on rank 0, every rank raises the same CheckpointError. It names the
        failing rank and ``doing``, and keeps the subclass of a CheckpointError. Only text crosses between ranks.
        """
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = step()
        except BaseException as error:  # an interrupt too: other ranks wait for this rank
            failure = error
        gathered = self._gather(doing, (value, None) if failure is None else (None, _describe(failure)))
        replies: list[tuple[R | None, _Failure | None]] | None = None
        if gathered is not None:
            failures = {rank: text for rank, (_, text) in enumerate(gathered) if text is not None}
            if failures:
                replies = [(None, _summary(doing, failures, self.size))] * self.size
            else:
                try:
                    replies = [(reply, None) for reply in decide([cast(T, value) for value, _ in gathered])]
                except BaseException as error:
                    failure = error
                    # A CheckpointError of ``decide`` concerns all ranks. Any other one is rank 0's own.
                    judged = _describe(error)
                    told = judged if judged.kind else _summary(doing, {0: judged}, self.size)
                    replies = [(None, told)] * self.size
        reply, refused = self._scatter(doing, replies)
        if failure is not None and (not isinstance(failure, Exception) or refused == _describe(failure)):
            raise failure
        if refused is not None:
            raise refused.error() from failure
        return cast(R, reply)

    def collect(self, doing: str, step: Callable[[], T]) -> list[T]:
        """Run ``step`` on every rank. Rank 0 gets all results by rank, others none. Errors as in `exchange`."""
        found: list[T] = []

        def keep(values: list[T]) -> list[None]:
            found.extend(values)
            return [None] * self.size

        self.exchange(doing, step, keep)
        return found

    def agree(self, doing: str, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank and return this rank's result once all have succeeded."""
        mine: list[T] = []
        self.exchange(doing, lambda: mine.append(step()), lambda values: values)
        return mine[0]

    def first(self, doing: str, step: Callable[[], R]) -> R:
        """Run ``step`` on rank 0 alone and return its result on every rank."""
        return self.exchange(doing, lambda: None, lambda _: [step()] * self.size)

    def _gather(self, doing: str, payload: Any) -> list[Any] | None:
        if self.group is None:
            return [payload]
        received: list[Any] | None = [None] * self.size if self.is_first else None
        with _dead_rank_is_an_error(doing):
            dist.gather_object(payload, received, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return received

    def _scatter(self, doing: str, replies: list[Any] | None) -> Any:
        if self.group is None:
            assert replies is not None
            return replies[0]
        received: list[Any] = [None]
        with _dead_rank_is_an_error(doing):
            dist.scatter_object_list(received, replies, src=dist.get_global_rank(self.group, 0), group=self.group)
        return received[0]


def warn_on_first_rank(message: str) -> None:
    """Give a warning once for all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)


@contextmanager
def _dead_rank_is_an_error(doing: str) -> Generator[None, None, None]:
    """Turn the backend's error about a lost peer into a CheckpointError."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"while {doing}: lost contact with another rank, which died or took longer than the process group's "
            f"timeout ({error})"
        ) from error


@dataclass(frozen=True)
class _Failure:
    kind: str  # of a CheckpointError, else ""
    text: str

    def error(self) -> CheckpointError:
        return getattr(errors, self.kind, CheckpointError)(self.text)


def _describe(error: BaseException) -> _Failure:
    if isinstance(error, CheckpointError):
        return _Failure(type(error).__name__, str(error))
    return _Failure("", f"{type(error).__name__}: {error}")


def _summary(doing: str, failures: dict[int, _Failure], size: int) -> _Failure:
    first = failures[min(failures)]
    if len(failures) == size and first.kind and set(failures.values()) == {first}:
        return first  # all ranks broke the same rule: no rank is named
    shown = [f"rank {rank}: {failure.text}" for rank, failure in sorted(failures.items())[:8]]
    return _Failure(first.kind, f"while {doing}: {first.text if size == 1 else '; '.join(shown)}")


def reachable(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """``tensor``, or a copy on a device that ``group`` has a backend for, such as NCCL's for a tensor on the host."""
    devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return tensor if tensor.device.type in devices else tensor.to(devices[0])


def _has_cpu_backend(group: dist.ProcessGroup) -> bool:
    return "cpu" in dist.get_backend_config(group)


def _own_group(purpose: str) -> dist.ProcessGroup:
    # torch's default is 30 minutes, whatever the timeout of the default group.
    timeout = cached_on_group("timeout", lambda: None)
    return cached_on_group(("gloo", purpose), lambda: dist.new_group(backend="gloo", timeout=timeout))


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of groups that are made here from now on, with the present default group."""
    cached_on_group("timeout", lambda: None)
    assert _made is not None
    _made[1]["timeout"] = timeout


# Groups and meshes made for a default process group. They are kept with that group, so that none outlives it.
_made: tuple[dist.ProcessGroup, dict[Hashable, Any]] | None = None


def cached_on_group(key: Hashable, make: Callable[[], T]) -> T:
    """First result of ``make`` for ``key`` on the default group. torch keeps groups, so runs share them. All ranks."""
    global _made
    default = dist.group.WORLD
    assert default is not None
    if _made is None or _made[0] is not default:
        _made = (default, {})
    known = _made[1]
    if key not in known:
        known[key] = make()
    return known[key]


def forget_made_groups() -> None:
    """Drop the objects of `cached_on_group`, before the default group is destroyed."""
    global _made
    _made = None
