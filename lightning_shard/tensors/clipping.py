"""Norm, clipping and scaling of all gradients at once, by one formula on every engine.

The norm is ``sqrt(sum(g ** 2))`` with squares and sums in fp64, rounded once to fp32. The coefficient is torch's,
``clamp(max_norm / (norm + 1e-6), max=1)`` (``torch.nn.utils.clip_grads_with_norm_``). In fp64 the order of the sum,
which depends on the sharding, changes the result by less than an fp32 spacing. So every engine and every rank gets the
same fp32 norm and the same coefficient.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_shard.errors import DataError
from lightning_shard.private_names import require
from lightning_shard.tensors.flat import local

# torch.nn.utils has nothing public for the norm of gradients in fp64.
require(torch, "_foreach_norm")


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Live gradients. A sparse one is coalesced and gives its values. A complex one gives its real view of shape
    ``(*shape, 2)``, so that a norm and a limit apply to real and imaginary parts.
    """
    found = []
    for parameter in parameters:
        if (gradient := parameter.grad) is not None and gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        if gradient is not None and gradient.is_complex():
            parameter.grad = gradient = gradient.resolve_conj()
            gradient = torch.view_as_real(gradient)
        if gradient is not None:
            found.append(gradient)
    return found


def _shard_axes(mesh: DeviceMesh | None, placements: Any) -> tuple[tuple[dist.ProcessGroup, str], ...]:
    """Process group and device type of each axis of ``mesh`` that shards gradients of these placements. ``placements``
    None means sharded over all axes. Full gradients have none.
    """
    if mesh is None:
        return ()
    placements = placements or (Shard(0),) * mesh.ndim
    assert not any(isinstance(each, Partial) for each in placements), "a gradient was read before its reduction ended"
    axes = [axis for axis, each in enumerate(placements) if isinstance(each, Shard) and mesh.size(axis) > 1]
    return tuple((mesh.get_group(axis), mesh.device_type) for axis in axes)


@torch.no_grad()
def gradient_norm(gradients: Iterable[Tensor], *, sharded_over: DeviceMesh | None = None) -> Tensor:
    """Total 2-norm of ``gradients`` (fp32, bf16 or fp16), an fp32 scalar, equal on all ranks. All ranks call it with
    the same parameters' gradients: DTensors over any mesh, or plain tensors, either full and equal or disjoint shards
    over ``sharded_over``.
    """
    by_axes: dict[tuple[tuple[tuple[dist.ProcessGroup, str], ...], torch.device], list[Tensor]] = defaultdict(list)
    placed: Any = None
    for grad in gradients:
        mesh, placements = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (sharded_over, None)
        if placed is None or placed[0] is not mesh or placed[1] != placements:  # mostly equal to the last one's
            placed = mesh, placements, _shard_axes(mesh, placements)
        own = local(grad)
        # Besides offloaded shards there may be full gradients on the device.
        by_axes[placed[2], own.device].append(own)
    if not by_axes:
        return torch.zeros(())
    total: Tensor | None = None
    for (axes, _), locals_ in by_axes.items():
        square = locals_[0].new_zeros((), dtype=torch.float64)
        if filled := [t for t in locals_ if t.numel() > 0]:
            # Without fp64 copies of the gradients.
            square = torch.stack(torch._foreach_norm(filled, 2, dtype=torch.float64)).square().sum()
        for group, device_type in axes:
            # An offloaded shard of a CUDA mesh has its gradient on the host, for which the group may have no backend.
            moved = square.to(device_type, non_blocking=True)
            dist.all_reduce(moved, group=group)
            square = moved.to(square.device)
        total = square if total is None else total + square.to(total.device, non_blocking=total.device.type != "cpu")
    assert total is not None
    return total.sqrt().to(torch.float32)


@torch.no_grad()
def clip_by_norm(gradients: Iterable[Tensor], max_norm: float, norm: Tensor, error_if_nonfinite: bool = False) -> None:
    """Scale gradients with ``norm`` in place to at most ``max_norm``. DataError: inf or NaN, ``error_if_nonfinite``."""
    if error_if_nonfinite and not torch.isfinite(norm):
        raise DataError(
            f"The gradient norm is {norm.item()}, and error_if_nonfinite is set. Look for a loss of inf or NaN, "
            "lower the learning rate, or set error_if_nonfinite: false to scale by it all the same, as torch does."
        )
    for locals_ in _by_device_and_dtype(gradients):
        clip_grads_with_norm_(_holders(locals_), max_norm, norm)


@torch.no_grad()
def clip_by_value(gradients: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of the gradients to ``[-max_value, max_value]`` in place. No communication."""
    for locals_ in _by_device_and_dtype(gradients):
        clip_grad_value_(_holders(locals_), max_value)


def _holders(gradients: list[Tensor]) -> Any:
    """Objects with a ``grad``, as torch's functions take parameters."""
    return [SimpleNamespace(grad=each) for each in gradients]


@torch.no_grad()
def multiply_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients by a scalar in place. No communication."""
    for locals_ in _by_device_and_dtype(gradients):
        here = factor.to(locals_[0].device)
        for gradient in locals_:
            gradient.mul_(here)


@torch.no_grad()
def unscale_gradients(gradients: Iterable[Tensor], scale: float, *, device: torch.device) -> Tensor:
    """Divide the gradients by ``scale`` in place. Returns a scalar on ``device``: 1 if any is inf or NaN here, or 0."""
    gradients = list(gradients)
    found = (~all_finite(gradients, device=device)).to(torch.float32)
    for locals_ in _by_device_and_dtype(gradients):
        for gradient in locals_:
            gradient.mul_(1.0 / scale)
    return found


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Whether no element on this rank is inf or NaN, a boolean scalar on ``device``. No communication."""
    finite = torch.ones((), dtype=torch.bool, device=device)
    for locals_ in _by_device_and_dtype(tensors):
        if filled := [t for t in locals_ if t.numel() > 0]:
            finite = finite & get_total_norm(filled, math.inf).isfinite().to(device)
    return finite


def _by_device_and_dtype(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in gradients:
        own = local(grad.coalesce().values() if grad.is_sparse else grad)
        groups[own.device, own.dtype].append(own)
    return list(groups.values())
