"""Offload inputs of recomputed modules to pinned host memory until backward needs them, bitwise unchanged.

A checkpointed module saves only its inputs, through the saved-tensor hooks around it. An input is copied to the host
while its module computes, and is freed on the device when the next module begins. Backward copies it to the device
while the module after it computes. On CPUs inputs stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.tensors.tracing import storage_key, version

SAVED_OBSERVERS: list[Callable[[Any], None]] = []
"""Called with the tensors that checkpointing saves out of sight of hooks around it. Empty but in a measured step."""


@dataclass(eq=False)
class _Input:
    """A saved input, which autograd's graph keeps alive."""

    host: Tensor
    device: Tensor | None  # None while it is on the host only.
    copied: Any  # The event after the last copy, or None if copies are synchronous.
    version: int  # The saved tensor's version counter.
    before: Callable[[], "_Input | None"]  # The input saved before this one, which backward needs next.


class HostInputs:
    """The inputs of a model's recomputed modules."""

    def __init__(self) -> None:
        self._newest: Callable[[], _Input | None] = lambda: None
        self._streams: dict[torch.device, torch.Stream] = {}

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a checkpointed forward, with the activations among its positional arguments offloaded."""
        return partial(self._run, run)

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Only activations: masks and tables of positions are the same tensors in all modules.
        own = {storage_key(a) for a in args if isinstance(a, Tensor) and a.requires_grad and not a.is_leaf}

        def save(tensor: Tensor) -> Tensor | _Input:
            saved = self._save(tensor) if storage_key(tensor) in own else tensor
            for observe in SAVED_OBSERVERS:
                observe(saved.host if isinstance(saved, _Input) else saved)
            return saved

        with saved_tensors_hooks(save, self._take):
            return run(*args, **kwargs)

    def _save(self, tensor: Tensor) -> Tensor | _Input:
        host = self.on_host(tensor)
        if host is None or host.stride() != tensor.stride():  # with gaps, or expanded
            return tensor
        newest = self._newest()
        if newest is not None and newest.device is not None:
            self._wait(newest)
            newest.device = None
        saved = _Input(host, tensor, self.copy(host, tensor), version(tensor), self._newest)
        self._newest = ref(saved)
        return saved

    def _take(self, saved: Tensor | _Input) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved)
        self._wait(saved)
        tensor, saved.device = saved.device, None
        if (before := saved.before()) is not None:
            self._fetch(before)
        assert tensor is not None
        return tensor

    def _fetch(self, saved: _Input) -> None:
        if saved.device is None:
            saved.device = self.on_device(saved.host)
            saved.copied, saved.version = self.copy(saved.device, saved.host), version(saved.device)

    def _wait(self, saved: _Input) -> None:
        assert saved.device is not None
        if saved.copied is not None:
            torch.accelerator.current_stream(saved.device.device).wait_event(saved.copied)
        if version(saved.device) != saved.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(saved.device.shape)} that a recomputed module took was changed in place "
                "since, so backward would compute with other values. Write x = x + y in place of x += y."
            )

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Memory for a copy of ``tensor``, or None if it is on the host."""
        self._device = tensor.device
        return None if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu", pin_memory=True)

    def on_device(self, host: Tensor) -> Tensor:
        """Memory for a copy of ``host``."""
        return torch.empty_like(host, device=self._device)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy on another stream, after all work that was queued so far. Returns the event of its end."""
        if self._device not in self._streams:
            self._streams[self._device] = torch.Stream(self._device)
        stream = self._streams[self._device]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            to.copy_(source, non_blocking=True)
        if to.device == self._device:
            to.record_stream(stream)  # if the graph is dropped, it is freed during the copy
        return stream.record_event()
