"""Buffers that ``state_dict()`` leaves out (``persistent=False``) and that steps change: counters, queues, caches."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.tensors.names import is_persistent, own_buffers, unwrapped_modules
from lightning_shard.tensors.tracing import version

_MOST_BYTES = 1 << 26  # of all that are saved of a rank

Known = dict[str, tuple[Callable[[], Any], int]]


def known_buffers(module: nn.Module) -> Known:
    """What tells later whether these buffers have changed, which reads no device and keeps none of them."""
    return {name: (weakref.ref(buffer), version(buffer)) for name, _, buffer in _named(module) if buffer is not None}


def changed_buffers(module: nn.Module, known: Known) -> dict[str, Tensor | None]:
    """FQN to a copy on the host of each that is not as it was ``known``; None for those that are not saved: they are no
    plain tensors, or more than `_MOST_BYTES` with the smaller ones.
    """
    found = {}
    for name, _, buffer in _named(module):
        first, seen = known.get(name, (lambda: None, 0))
        if buffer is not None and not (first() is buffer and seen == version(buffer)):
            found[name] = buffer
    changed: dict[str, Tensor | None] = {}
    total = 0
    for name, buffer in sorted(found.items(), key=lambda each: each[1].numel() * each[1].itemsize):
        plain = type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta
        total += buffer.nbytes if plain else 0
        fits = plain and total <= _MOST_BYTES
        changed[name] = buffer.detach().to("cpu", copy=True).contiguous() if fits else None
    return changed


@torch.no_grad()
def load_buffers(module: nn.Module, saved: Mapping[str, Tensor | None], device: torch.device) -> list[str]:
    """Set what `changed_buffers` gave, in place where it fits; names of those that begin anew."""
    places = {name: (owner, buffer) for name, owner, buffer in _named(module)}
    for name, value in saved.items():
        owner, buffer = places.get(name, (None, None))
        if value is None or owner is None:
            continue
        fits = buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if buffer is not None and fits and not buffer.is_inference():
            buffer.copy_(value)
        else:
            setattr(owner, name.rpartition(".")[2], value.to(device if buffer is None else buffer.device, copy=True))
    return [name for name, value in saved.items() if value is None or name not in places]


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor | None]]:
    for path, owner in unwrapped_modules(module):
        for name, buffer in own_buffers(owner):
            if not is_persistent(owner, name):
                yield f"{path}.{name}".lstrip("."), owner, buffer
