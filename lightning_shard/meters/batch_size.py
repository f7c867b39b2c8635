"""How much a batch holds: samples, tokens, and tokens that only fill up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # The label that torch's cross entropy leaves out.


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """What one rank's batch holds."""

    samples: int  # Size of the first dim of the tokens, else of the first tensor that has one; 0 where there is none.
    # Elements of the first integer tensor of two or more dims, such as (batch, time); None: there is none.
    tokens: int | None
    # How many of the tokens fill nothing up, a 0-d integer tensor on the batch's device, which nobody waited for; None:
    # that is not known.
    real: Tensor | None


def batch_size(batch: Any, *, tokens_key: str | int | None = None, mask_key: str | int | None = None) -> BatchSize:
    """Measure a batch; tensors are looked for in mappings and sequences, in their order.

    ``tokens_key`` is the entry that holds tokens; default: ``input_ids``, or found as `BatchSize` says. Padding is
    where the entry ``mask_key`` is zero, or -100. Without it: where an entry ``attention_mask`` of the tokens' shape is
    zero; else where an entry ``labels``, or another integer tensor of the tokens' shape, is -100.
    """
    tensors = list(_tensors(batch))
    named = _entry(batch, "input_ids" if tokens_key is None else tokens_key)
    tokens = named if named is not None else next((tensor for tensor in tensors if _is_tokens(tensor)), None)
    if tokens is None:
        samples = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
        return BatchSize(samples=samples, tokens=None, real=None)
    return BatchSize(samples=tokens.shape[0], tokens=tokens.numel(), real=_real(batch, tensors, tokens, mask_key))


def _real(batch: Any, tensors: Sequence[Tensor], tokens: Tensor, mask_key: str | int | None) -> Tensor | None:
    mask = _entry(batch, mask_key if mask_key is not None else "attention_mask")
    if mask is not None and mask.shape == tokens.shape:
        return _counted(mask)
    labels = _entry(batch, "labels")
    others = [t for t in tensors if t is not tokens and t.shape == tokens.shape and _is_tokens(t)]
    if labels is None or labels.shape != tokens.shape:
        labels = others[0] if others else None
    return None if labels is None else (labels != IGNORED).sum()


def _counted(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask.sum()
    return ((mask != 0) & (mask != IGNORED)).sum()


def _entry(batch: Any, key: str | int | None) -> Tensor | None:
    """The tensor under a key of a mapping or at a place of a sequence, if there is one."""
    if key is None or isinstance(batch, Tensor | str | bytes):
        return None
    found = None
    if isinstance(batch, Mapping):
        found = batch.get(key)
    elif isinstance(batch, Sequence) and isinstance(key, int) and key < len(batch):
        found = batch[key]
    return found if isinstance(found, Tensor) else None


def _is_tokens(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    # Of more dims, bytes are pictures.
    return tensor.ndim == 2 if tensor.dtype == torch.uint8 else tensor.ndim > 1


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [tensor for item in batch for tensor in _tensors(item)]
    return []
