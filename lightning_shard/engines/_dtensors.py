"""What torch asks each shard of a DTensor alone, asked of the full tensor: the one importer of its private dispatch.

torch draws random numbers of each shard by itself: on CPUs every rank the same ones for another part, and on GPUs
others than those of a tensor that is not sharded. So `nn.init` in a hook, or noise that is added to gradients, would
train another model. The number that is read from a sum, a norm or ``any()`` of a DTensor is of this rank's shard. And
``weight[0]`` of a sharded row is a copy: what is written to it (``weight[0].zero_()``, ``weight[3, 2] = 1``) is lost.
"""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.private_names import require
from lightning_shard.tensors.full import full_of, own_part, scatter_full
from lightning_shard.tensors.versions import version

require(DTensor, "_op_dispatcher", tested="torch 2.11 to 2.13")
require(torch.distributed.tensor, "_dtensor_spec", tested="torch 2.11 to 2.13")
require(type(DTensor._op_dispatcher), "_custom_op_handlers", tested="torch 2.11 to 2.13")
require(torch.ops.aten, "_local_scalar_dense _unique2", tested="torch 2.11 to 2.13")
require(torch, "_C", tested="torch 2.11 to 2.13")
require(torch._C, "_disabled_torch_function_impl", tested="torch 2.11 to 2.13")
require(Tensor, "_make_wrapper_subclass", tested="torch 2.11 to 2.13")

_aten = torch.ops.aten
# Their values depend on the shape alone. `torch.Tensor.random_` and `nn.init` end in these.
_FILL: tuple[Any, ...] = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default),
    *(_aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
)
_LIKE: tuple[Any, ...] = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)
# They need the values. An extreme of an empty shard is an error on its rank alone, and gloo's may lose a NaN.
_OF_VALUES: tuple[Any, ...] = (
    *(_aten.bernoulli.default, _aten.multinomial.default, _aten.native_dropout.default),
    *(_aten.max.default, _aten.min.default, _aten.max.dim, _aten.min.dim, _aten.amax.default, _aten.amin.default),
    *(_aten.argmax.default, _aten.argmin.default, _aten.aminmax.default, _aten._local_scalar_dense.default),
)

# torch has no strategy for these, or none for a sharded dimension.
_IN_FULL: tuple[Any, ...] = (
    *(_aten.fill_.Tensor, _aten.triu_.default, _aten.tril_.default, _aten.renorm.default, _aten.renorm_.default),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, _aten.index_copy_.default, _aten.index_add_.default),
    *(_aten.index_put_.default, _aten.index.Tensor, _aten.masked_select.default),
    *(_aten.scatter_.value, _aten.scatter_.src, _aten.scatter_add_.default, _aten.nonzero.default),
    *(_aten._unique2.default, _aten.kthvalue.default, _aten.allclose.default),
    *(_aten.index_select.default, _aten.gather.default),
)
_HOOK = re.compile(r"\[(LightningModule|Callback)\].*\.(on_\w+|configure_gradient_clipping|lr_scheduler_step)$")
# A plain tensor beside a DTensor is taken for a full one in these, where the result has the DTensor's shape. Others
# are those of activations, of which each rank has its own.
_IN_PLACE: tuple[Any, ...] = (
    *(_aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default),
    *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor, _aten.clamp_.Tensor),
)
_POINTWISE: tuple[Any, ...] = (
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.lerp.Scalar, _aten.lerp.Tensor),
    *(_aten.where.self, _aten.where.ScalarOther, _aten.maximum.default, _aten.minimum.default),
    *(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.clamp.Tensor),
    *(_aten.eq.Tensor, _aten.ne.Tensor, _aten.lt.Tensor, _aten.le.Tensor, _aten.gt.Tensor, _aten.ge.Tensor),
)
# Views, with the index of the argument that is their dimension.
_OF_DIM = {
    _aten.select.int: 1,
    _aten.slice.Tensor: 1,
    _aten.unbind.int: 1,
    _aten.split.Tensor: 2,
    _aten.split_with_sizes.default: 2,
}


def answer_in_full() -> Callable[[], None]:
    """Draw random numbers of DTensors, read numbers from them, and write to parts of them, as of full tensors, until
    the result is called. Of what is drawn, with generators in the same state on all ranks, each rank keeps its part;
    the full tensor is there for the moment. To read a number (``item``, ``float``, ``if``) from what is not on every
    rank in full, and to read or write a part of a sharded dimension, is a collective.
    """
    own = dict.fromkeys(_FILL, _fill) | dict.fromkeys(_LIKE, _like) | dict.fromkeys(_OF_VALUES, _of_values)
    own |= {_aten.eye.out: _eye, _aten.eye.m_out: _eye}
    own |= dict.fromkeys(_IN_FULL, _in_full) | dict.fromkeys((*_OF_DIM, _aten.diagonal.default), _part_of)
    own |= dict.fromkeys((*_IN_PLACE, *_POINTWISE), _with_plain) | {_aten.view.default: _reshaped}
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = {op: handler for op, handler in own.items() if handlers.get(op) is not handler}  # Another fit's are there.
    # torch's own for argmin and argmax fails on the ranks whose shards are empty.
    replaced = {op: handlers[op] for op in own if op in handlers}
    handlers.update(own)

    def undo() -> None:
        for op in own:
            handlers.pop(op, None)
        handlers.update(replaced)

    return undo


@contextmanager
def parts_as_torch_does() -> Generator[None, None, None]:
    """Leave out what `answer_in_full` does for parts of tensors, at the cost of collectives."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = {op: handler for op, handler in handlers.items() if handler in (_in_full, _part_of, _reshaped, _with_plain)}
    for op in own:
        del handlers[op]
    try:
        yield
    finally:
        handlers.update(own)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    _keep(op(_empty(tensor, kwargs), *rest, **kwargs), tensor)
    return tensor


def _like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    return _placed(op(_empty(tensor, kwargs), *rest, **kwargs), tensor)


def _of_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    return tree_map_only(Tensor, lambda full: _placed(full, tensor), op(full_of(tensor), *rest, **kwargs))


def _in_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor))
    full, full_kwargs = tree_map_only(DTensor, full_of, (args, kwargs))
    # An index is where the shards are: on the host, if they are offloaded.
    others = tree_map_only(Tensor, lambda each: each.to(tensor.device_mesh.device_type), (full[1:], full_kwargs))
    full = (full[0], *others[0])
    out = op(*full, **others[1])
    if not op._schema.is_mutable:
        return tree_map_only(Tensor, lambda value: _placed(value, tensor), out)
    own = args[0].to_local() if isinstance(args[0], DTensor) else None
    if own is not None and (_sharded_dims(args[0]) or own.device != full[0].device):
        _keep(full[0], args[0])
    return args[0]


def _with_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each for each in args if isinstance(each, Tensor) and each.ndim]
    like = next((each for each in given if isinstance(each, DTensor)), None)
    if PlainTensorsInHooks.depth and like is not None and not all(isinstance(each, DTensor) for each in given):
        if op._schema.is_mutable and not isinstance(args[0], DTensor):
            return op(*tree_map_only(DTensor, lambda each: full_of(each).to(args[0].device), args), **kwargs)
        if torch.broadcast_shapes(*(each.shape for each in given)) == like.shape:
            shape, chosen = like.shape, like
            args = tuple(
                _placed(each.expand(shape), chosen)
                if isinstance(each, Tensor) and not isinstance(each, DTensor) and each.ndim
                else each
                for each in args
            )
    return _own(op, args, kwargs)


def _part_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view; of a sharded dimension one of the full tensor, which writes through."""
    tensor, *rest = args
    sharded = _sharded_dims(tensor)
    if op is _aten.diagonal.default:
        touched = bool(sharded)
    else:
        dim = (args[_OF_DIM[op]] if len(args) > _OF_DIM[op] else 0) % tensor.ndim
        everything = (
            op is _aten.slice.Tensor and op(torch.empty(tensor.shape, device="meta"), *rest).shape == tensor.shape
        )
        touched = dim in sharded and not everything
    return _of_full(op, args, kwargs) if touched else _own(op, args, kwargs)


def _reshaped(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _own(op, args, kwargs)
    except RuntimeError:  # It would mix rows of two ranks; the same on all.
        if not _sharded_dims(args[0]):
            raise
        return _of_full(op, args, kwargs)


def _own(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does without a handler."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _of_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    source = _Source(tensor)
    return tree_map_only(
        Tensor, lambda part: _on_every_rank(_Part(part, source), tensor), op(source.full, *rest, **kwargs)
    )


class PlainTensorsInHooks:
    """Takes plain tensors that meet DTensors in the user's hooks for what they are there: full, equal on all ranks."""

    depth = 0  # of hooks in hooks, in this process

    @classmethod
    def begins(cls, action: str) -> None:
        """``action`` is Lightning's name for it."""
        cls.depth += _is_hook(action)

    @classmethod
    def ends(cls, action: str) -> None:
        cls.depth -= _is_hook(action)


@cache
def _is_hook(action: str) -> bool:
    return _HOOK.match(action) is not None


class _Source:
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
        _keep(self.full, self._tensor)
        self._seen = version(self._tensor)


class _Part(Tensor):
    """A view of a `_Source`'s full tensor; in-place operators change the sharded tensor too."""

    part: Tensor
    source: _Source

    @staticmethod
    def __new__(cls, part: Tensor, source: _Source) -> "_Part":
        made: _Part = Tensor._make_wrapper_subclass(
            *(cls, part.shape, part.stride(), part.storage_offset()), dtype=part.dtype, device=part.device
        )
        made.part, made.source = part, source
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = (args, kwargs or {})
        sources = {id(each.source): each.source for each in tree_leaves(given) if isinstance(each, _Part)}
        for source in sources.values():
            source.refresh()
        own, own_kwargs = tree_map_only(_Part, lambda each: each.part, given)
        out = func(*own, **own_kwargs)
        if not func._schema.is_mutable:
            (source, *_) = sources.values()
            return tree_map_only(Tensor, lambda part: _Part(part, source), out) if func.is_view else out
        changed = [i for i, of in enumerate(func._schema.arguments) if of.alias_info and of.alias_info.is_write]
        names = [of.name for of in func._schema.arguments]
        for each in tree_leaves([args[i] if i < len(args) else given[1].get(names[i]) for i in changed]):
            if isinstance(each, _Part):
                each.source.write(each.part)
        return args[0] if isinstance(out, Tensor) and isinstance(args[0], _Part) else out

    def numpy(self, **kwargs: Any) -> Any:
        return self.part.numpy(**kwargs)

    def tolist(self) -> Any:
        return self.part.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.part)


def _sharded_dims(tensor: DTensor) -> set[int]:
    return {placement.dim for placement in tensor.placements if isinstance(placement, Shard)}


@torch.no_grad()
def _keep(full: Tensor, tensor: DTensor) -> None:
    """Write this rank's part of ``full`` to it, and count that."""
    scatter_full(full, tensor)
    increment_version(tensor)


def _placed(full: Tensor, tensor: DTensor) -> DTensor:
    """As ``tensor`` is; on every rank in full what has another shape."""
    device = tensor.to_local().device
    if full.shape != tensor.shape:
        return _on_every_rank(full.to(device), tensor)
    return _of_local(own_part(full, tensor).to(device), tensor, tensor.placements, full)


def _on_every_rank(full: Tensor, tensor: DTensor) -> DTensor:
    return _of_local(full, tensor, (Replicate(),) * tensor.device_mesh.ndim, full)


def _of_local(part: Tensor, tensor: DTensor, placements: tuple[Placement, ...], full: Tensor) -> DTensor:
    """As ``DTensor.from_local`` on the mesh of ``tensor``, which moves what is offloaded to the mesh's device."""
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensor(part, DTensorSpec(tensor.device_mesh, placements, tensor_meta=meta), requires_grad=False)


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Torch would make each shard an identity of its own."""
    return _fill(lambda full: full.zero_().fill_diagonal_(1), (kwargs["out"],), {})


def _empty(tensor: DTensor, kwargs: dict[str, Any]) -> Tensor:
    # Of a shard that is kept on the host the numbers are the device's too, as where nothing is offloaded.
    generator = kwargs.get("generator")
    device = tensor.device_mesh.device_type if generator is None else generator.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
