"""A CPU whose copies to and from pinned host memory are as late as a GPU's may be.

What DeepSpeed pins is host memory here and all else is the device. A copy with ``non_blocking=True`` from the device
into pinned memory happens when something waits for its stream; until then the target holds NaN. One in the other
direction fails if the host has changed its source before something waited. So code that reads, writes or reuses host
memory without waiting computes other numbers than an ordinary run, or stops.

Device operations are in the order of their calls, whatever their stream: this finds missing waits of the host alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class LateCopies:
    """The memory and the copies under way."""

    def __init__(self) -> None:
        self._pinned: dict[int, Tensor] = {}  # kept, so that no memory comes back under another name
        self._to_host: list[tuple[Stream, Tensor, Tensor]] = []
        self._to_device: list[tuple[Stream, Tensor, Tensor]] = []
        self.late = 0
        """Copies that were made late."""

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = torch.empty_like(tensor)
        _copy(pinned, tensor)
        self._pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._pinned

    def on_device(self, pinned: Tensor) -> Tensor:
        """What the device reads from pinned memory: its copies into it are in order."""
        held = [(target, target.detach().clone()) for _, target, _ in self._to_host]
        for _, target, values in self._to_host:
            _copy(target.detach(), values)
        found = pinned.detach().clone()
        for target, poison in reversed(held):
            _copy(target.detach(), poison)
        return found

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        into, of = self.is_pinned(target), self.is_pinned(source)
        if not non_blocking or into == of:
            _copy(target, source)
        elif into:
            # What the stream was to read there it has read before it writes.
            self._read({id(copy) for copy in self._to_device if copy[0] is _current and _overlap(copy[1], target)})
            self._to_host.append((_current, target.detach(), source.detach().to(target.dtype, copy=True)))
            target.detach().fill_(torch.nan)
            self.late += 1
        else:
            _copy(target, self.on_device(source))
            self._to_device.append((_current, source.detach(), source.detach().clone()))

    def wait(self, stream: Stream | None = None) -> None:
        """Make the copies of a stream, or all."""
        done = [copy for copy in self._to_host if stream in (None, copy[0])]
        self._to_host = [copy for copy in self._to_host if stream not in (None, copy[0])]
        self._read({id(copy) for copy in self._to_device if stream in (None, copy[0])})
        for _, target, values in done:
            _copy(target, values)

    def _read(self, copies: set[int]) -> None:
        """Let these copies to the device end, of sources that are still as they were."""
        for _, source, values in (copy for copy in self._to_device if id(copy) in copies):
            assert torch.equal(source.view(torch.uint8), values.view(torch.uint8)), "written while the device read it"
        self._to_device = [copy for copy in self._to_device if id(copy) not in copies]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether contiguous tensors have memory in common."""
    first, second = sorted((one, other), key=Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + first.nbytes


class Stream:
    """A stream of the pretended device."""

    def synchronize(self) -> None:
        _copies.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """The host goes on."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Event:
        return Event(self)


class Event:
    """An event of the pretended device."""

    def __init__(self, stream: Stream | None = None, **kwargs: Any) -> None:
        self.stream = stream

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or _current

    def synchronize(self) -> None:
        _copies.wait(self.stream)

    def query(self) -> bool:
        return False


_copy = Tensor.copy_
_copies = LateCopies()
_default = _current = Stream()


@contextlib.contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    global _current
    before, _current = _current, stream or _current
    try:
        yield
    finally:
        _current = before


@contextlib.contextmanager
def late_copies() -> Iterator[LateCopies]:
    """Let DeepSpeed compute on the pretended device, and its copies be late."""
    from deepspeed import accelerator

    from lightning_shard.engines.zero import connection

    global _copies
    _copies = copies = LateCopies()
    before = accelerator.get_accelerator()

    class Late(type(connection._cpu_accelerator())):  # type: ignore[misc]
        Stream = Stream
        Event = Event

        def is_synchronized_device(self) -> bool:
            return False

        def use_host_timers(self) -> bool:
            return True

        def stream(self, stream: Stream | None) -> Any:
            return _on(stream)

        def current_stream(self, device_index: Any = None) -> Stream:
            return _current

        def default_stream(self, device_index: Any = None) -> Stream:
            return _default

        def synchronize(self, device_index: Any = None) -> None:
            copies.wait()

        def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
            return copies.pin(tensor)

        def on_accelerator(self, tensor: Tensor) -> bool:
            return not copies.is_pinned(tensor)

    to = Tensor.to

    def copy_late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.copy(target, source, non_blocking)
        return target

    def to_late(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = bool(args) and isinstance(args[0], torch.device | str)
        if moved and kwargs.get("non_blocking") and copies.is_pinned(tensor):
            tensor = copies.on_device(tensor)
        return to(tensor, *args, **kwargs)

    replaced = {"copy_": copy_late, "to": to_late, "record_stream": lambda tensor, stream: None}
    originals = {name: getattr(Tensor, name) for name in replaced}
    accelerator.set_accelerator(Late())
    try:
        for name, function in replaced.items():
            setattr(Tensor, name, function)
        yield copies
    finally:
        for name, function in originals.items():
            setattr(Tensor, name, function)
        accelerator.set_accelerator(before)
