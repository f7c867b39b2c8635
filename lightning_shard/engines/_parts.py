"""Parts of a sharded tensor that are views of the full one, and write through; and how numbers are read of one."""

from collections.abc import Callable
from functools import partialmethod
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, _dtensor_spec

from lightning_shard.private_names import require
from lightning_shard.tensors.full import full_of, own_part, scatter_full
from lightning_shard.tensors.tracing import schema_of, tree_leaves, tree_map_only, version

require(Tensor, "_make_wrapper_subclass")


@torch.no_grad()
def keep(full: Tensor, tensor: DTensor) -> None:
    """Write this rank's part of ``full`` to it, and count that."""
    scatter_full(full, tensor)
    increment_version(tensor)


def written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that ``op`` writes to."""
    arguments = enumerate(schema_of(op).arguments)
    of = [(i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write]
    given = tree_leaves([args[i] if i < len(args) else kwargs.get(name) for i, name in of])
    return [each for each in given if isinstance(each, Tensor)]


def has_several(op: Any, args: tuple[Any, ...]) -> bool:
    return op.name().startswith("aten::_foreach_") and isinstance(args[0], list | tuple) and len(args[0]) > 1


def one_by_one(take: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``take`` gives for each tensor of a list, of which no two are full at a time."""
    rows = (tuple(e[i : i + 1] if isinstance(e, list | tuple) else e for e in args) for i in range(len(args[0])))
    outs = [take(op, row, kwargs) for row in rows]
    return None if schema_of(op).is_mutable else [each for out in outs for each in out]


def laid_out(full: Tensor, like: Tensor) -> Tensor:
    return full if full.stride() == like.stride() else full.new_empty_strided(like.shape, like.stride()).copy_(full)


def is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def sharded_dims(tensor: DTensor) -> set[int]:
    return {placement.dim for placement in tensor.placements if isinstance(placement, Shard)}


def placed(full: Tensor, tensor: DTensor) -> DTensor:
    """As ``tensor`` is; on every rank in full what has another shape."""
    device = tensor.to_local().device
    if full.shape != tensor.shape or is_partial(tensor):
        return on_every_rank(full.to(device), tensor)
    return _of_local(own_part(full, tensor).to(device), tensor, tensor.placements, full)


def on_every_rank(full: Tensor, tensor: DTensor) -> DTensor:
    return _of_local(full, tensor, (Replicate(),) * tensor.device_mesh.ndim, full)


def _of_local(part: Tensor, tensor: DTensor, placements: tuple[Placement, ...], full: Tensor) -> DTensor:
    """As ``DTensor.from_local`` on the mesh of ``tensor``, which moves what is offloaded to the mesh's device."""
    meta = _dtensor_spec.TensorMeta(full.shape, full.stride(), full.dtype)
    spec = _dtensor_spec.DTensorSpec(tensor.device_mesh, placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


class Source:
    """A sharded tensor, and all of it on this rank for the parts that were taken of it. All ranks call its methods."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor, self._seen = tensor, version(tensor)
        with torch.no_grad():
            self.full = full_of(tensor).to(tensor.to_local().device, copy=True)

    def refresh(self) -> None:
        """Follow what was written to the tensor since."""
        if self._seen != version(self._tensor):
            self.full.copy_(full_of(self._tensor))
            self._seen = version(self._tensor)

    def write(self, part: Tensor) -> None:
        """Write ``part``, which is one of ``full``, to the tensor too."""
        if self._seen != version(self._tensor):  # The same operator wrote to a part that was taken apart from this one.
            mine = part.clone()
            self.refresh()
            part.copy_(mine)
        keep(self.full, self._tensor)
        self._seen = version(self._tensor)


class Part(Tensor):
    """A view of a `Source`'s full tensor; in-place operators change the sharded tensor too."""

    part: Tensor
    source: Source

    @staticmethod
    def __new__(cls, part: Tensor, source: Source) -> "Part":
        made: Part = Tensor._make_wrapper_subclass(
            *(cls, part.shape, part.stride(), part.storage_offset()), dtype=part.dtype, device=part.device
        )
        made.part, made.source = part, source
        return made

    __torch_function__ = nn.Parameter.__torch_function__  # Results are of no class of their own.

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = (args, kwargs or {})
        sources = {id(each.source): each.source for each in tree_leaves(given) if isinstance(each, Part)}
        for source in sources.values():
            source.refresh()
        own, own_kwargs = tree_map_only(Part, lambda each: each.part, given)
        out = func(*own, **own_kwargs)
        if not schema_of(func).is_mutable:
            (source, *_) = sources.values()
            return tree_map_only(Tensor, lambda part: Part(part, source), out) if func.is_view else out
        for each in written(func, args, kwargs or {}):
            if isinstance(each, Part):
                each.source.write(each.part)
        return args[0] if isinstance(out, Tensor) and isinstance(args[0], Part) else out

    def numpy(self, **kwargs: Any) -> Any:
        return self.part.numpy(**kwargs)

    def tolist(self) -> Any:
        return self.part.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.part)

    def __format__(self, how: str) -> str:
        return format(self.part, how)


def _of_this_rank(method: str) -> Callable[..., Any]:
    """A method for DTensors that each rank has in full: a rank alone, as loggers are, would wait for the others."""

    def read(self: DTensor, **kwargs: Any) -> Any:
        if not all(isinstance(placement, Replicate) for placement in self.placements):
            raise TypeError(
                f"{method}() of a sharded tensor of shape {tuple(self.shape)}: this rank has a shard of it alone. Call "
                f"tensor.full_tensor().{method}(); full_tensor() is called on all ranks."
            )
        return getattr(self.to_local(), method)(**kwargs)

    return read


full_tensor = DTensor.full_tensor


def _gathered(self: DTensor, **kwargs: Any) -> Tensor:
    """As ``DTensor.full_tensor``, which gathers what is offloaded on the host, where NCCL has no backend."""
    device = self.to_local().device
    offloaded = device.type != self.device_mesh.device_type
    return full_of(self).to(device) if offloaded else full_tensor(self, **kwargs)


def _number(self: DTensor, kind: Callable[[Any], Any]) -> Any:
    """As of a full tensor, in ``torch.tensor([p.grad.norm() for p in ...])`` too, which dispatches nothing to them."""
    with _SetExcludeDispatchKeyGuard(DispatchKey.Python, False):
        return kind(self.item())


METHODS = {
    **{method: _of_this_rank(method) for method in ("numpy", "tolist")},
    **{f"__{kind.__name__}__": partialmethod(_number, kind) for kind in (float, index, bool)},
    "full_tensor": _gathered,
    "__format__": lambda self, how: format(full_of(self) if how else str(self), how),  # f"{weight.norm():.3f}"
}
