"""What torch asks each shard of a DTensor alone, asked of the full tensor: the one importer of its private dispatch.

torch draws random numbers of each shard by itself: on CPUs every rank the same ones for another part, and on GPUs
others than those of a tensor that is not sharded. So `nn.init` in a hook, or noise that is added to gradients, would
train another model. The number that is read from a sum, a norm or ``any()`` of a DTensor is of this rank's shard. And
``weight[0]`` of a sharded row is a copy: what is written to it (``weight[0].zero_()``, ``weight[3, 2] = 1``) is lost.
"""

import math
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _dispatch_get_all_op_names as all_operators
from torch.distributed.tensor import DTensor

from lightning_shard.engines import _parts
from lightning_shard.engines._parts import METHODS, Part, Source, full_tensor
from lightning_shard.private_names import require
from lightning_shard.tensors.full import full_of
from lightning_shard.tensors.tracing import READ_NUMBER, schema_of, tree_leaves, tree_map_only

require(DTensor, "_op_dispatcher")
_dispatcher: Any = DTensor._op_dispatcher
require(type(_dispatcher), "_custom_op_handlers")
require(DTensor, "_local_tensor _spec")
require(torch.ops.aten, "_foreach_max _foreach_norm _unique2")

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
# They need the values: an extreme of an empty shard is an error on its rank alone, and gloo's may lose a NaN. For those
# from ``fill_`` on torch has no strategy, or none for a sharded dimension.
_IN_FULL: tuple[Any, ...] = (
    *(_aten.bernoulli.default, _aten.multinomial.default, _aten.native_dropout.default),
    *(_aten.max.default, _aten.min.default, _aten.max.dim, _aten.min.dim, _aten.amax.default, _aten.amin.default),
    *(_aten.argmax.default, _aten.argmin.default, _aten.aminmax.default, READ_NUMBER),
    *(_aten.fill_.Tensor, _aten.triu_.default, _aten.tril_.default, _aten.renorm.default, _aten.renorm_.default),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, _aten.index_copy_.default, _aten.index_add_.default),
    *(_aten.index_put_.default, _aten.index.Tensor, _aten.masked_select.default),
    *(_aten.scatter_.value, _aten.scatter_.src, _aten.scatter_add_.default, _aten.nonzero.default),
    *(_aten._unique2.default, _aten.kthvalue.default, _aten.allclose.default),
    *(_aten.index_select.default, _aten.gather.default, _aten._foreach_max.default),
    # Their mean would be that of the shards' means, of which some have fewer elements.
    *(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default, _aten.soft_margin_loss.default),
    *(_aten.binary_cross_entropy.default, _aten.binary_cross_entropy_with_logits.default),
)
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_CAN_NOT = re.compile("No backend type associated|Sharding propagation failed|placement changes are not supported")
_ACTIONS = {
    "hook": re.compile(r"\[(LightningModule|Callback)\].*\.(on_\w+|configure_gradient_clipping|lr_scheduler_step)$"),
    "step": re.compile(r"\[Strategy\].*\.training_step$"),
    "own": re.compile(r"\[LightningModule\].*\.optimizer_step$"),  # The module's own, around all of a step.
    "optimizer": re.compile(r"optimizer_step"),
}
# Element by element as what torch tags so, where all have one shape.
_POINTWISE_TOO: tuple[Any, ...] = (
    *(_aten.copy_.default, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
    *(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.where.ScalarOther),
)
# Views, with the index of the argument that is their dimension.
_OF_DIM = {
    _aten.select.int: 1,
    _aten.slice.Tensor: 1,
    _aten.unbind.int: 1,
    _aten.split.Tensor: 2,
    _aten.split_with_sizes.default: 2,
}


class InFull:
    """What the operators of DTensors do in this process, while an engine asks for it."""

    wrote = False  # Whether the hook that runs, or ran last, has written to a DTensor.
    _engines = 0
    _within: ClassVar[list[str]] = []  # The actions that run, one in another: hooks, training steps, optimizers' steps.
    torchs: dict[Any, Any]
    _handlers: dict[str, dict[Any, Any]]

    @classmethod
    def answer(cls) -> Callable[[], None]:
        """Draw random numbers of DTensors, read numbers from them, and write to parts of them, as of full tensors,
        until the result is called. Of what is drawn, with generators in the same state on all ranks, each rank keeps
        its part; the full tensor is there for the moment. To read a number (``item``, ``float``, ``if``) from what is
        not on every rank in full, and to read or write a part of a sharded dimension, is a collective.
        """
        if cls._engines == 0:
            cls.torchs = _take(None)
            ops, own = _all_operators(), _handlers()
            # torch's own for argmin and argmax fails on the ranks whose shards are empty.
            always = cls.torchs | own | dict.fromkeys(_NORMS, _own_or_in_full)
            hooks = cls.torchs | dict.fromkeys(ops, _in_a_hook) | own
            hooks |= {op: partial(_noted, handler) for op, handler in hooks.items() if schema_of(op).is_mutable}
            steps = cls.torchs | dict.fromkeys(ops, _in_a_step) | own
            parts = cls.torchs | {op: handler for op, handler in own.items() if handler not in _OF_PARTS}
            cls._handlers = {"optimizer": always, "hook": hooks, "own": hooks, "step": steps, "parts": parts}
            for name, method in METHODS.items():
                setattr(DTensor, name, method)
        cls._engines += 1
        cls._choose()
        return cls._end

    @classmethod
    def _end(cls) -> None:
        cls._engines -= 1
        cls._choose()
        if cls._engines == 0:
            _take(cls.torchs)
            for method in METHODS:
                delattr(DTensor, method)
            DTensor.full_tensor = full_tensor  # type: ignore[method-assign]

    @classmethod
    def _choose(cls) -> None:
        if cls._engines:
            _take(cls._handlers[cls._within[-1] if cls._within else "optimizer"])

    @classmethod
    @contextmanager
    def parts_as_torch_does(cls) -> Generator[None, None, None]:
        """Leave out what `answer` does for parts of tensors, at the cost of collectives."""
        cls._within.append("parts")
        cls._choose()
        try:
            yield
        finally:
            cls._within.pop()
            cls._choose()

    @classmethod
    def begins(cls, action: str) -> bool:
        """Take plain tensors that meet DTensors in the user's hooks for what they are there: full. In a training step
        alone those that are written to DTensors, such as to gradients in manual optimization. ``action`` is Lightning's
        name for what begins. Whether it is a hook in no other and in no step.
        """
        outside = cls._outside()
        if kind := _kind(action):
            cls._within.append(kind)
            cls._choose()
        cls.wrote &= not outside
        return outside and kind == "hook"

    @classmethod
    def ends(cls, action: str) -> bool:
        """Whether a hook has ended that was in no other and in no step."""
        if (kind := _kind(action)) in cls._within:
            while cls._within.pop() != kind:  # Lightning tells no end of an optimizer's step that fails.
                pass
            cls._choose()
        return kind == "hook" and cls._outside()

    @classmethod
    def in_a_hook(cls) -> bool:
        """Whether what runs is the user's hook, inside of a step too."""
        return cls._within[-1:] == ["hook"]

    @classmethod
    def _outside(cls) -> bool:
        return "hook" not in cls._within and "step" not in cls._within


@cache
def _kind(action: str) -> str:
    return next((kind for kind, actions in _ACTIONS.items() if actions.match(action)), "")


def _take(handlers: dict[Any, Any] | None) -> Any:
    """Let DTensors' operators go by these ``handlers``; those that they go by now."""
    if handlers is not None:
        _dispatcher._custom_op_handlers = handlers
    return _dispatcher._custom_op_handlers


def _handlers() -> dict[Any, Any]:
    """What each operator does in place of torch's, with its arguments."""
    own = dict.fromkeys(_FILL, _fill) | dict.fromkeys(_LIKE, _like) | dict.fromkeys(_IN_FULL, _in_full)
    own |= {_aten.eye.out: _eye, _aten.eye.m_out: _eye, _aten.view.default: _viewed, _aten.as_strided.default: _viewed}
    return own | dict.fromkeys((*_OF_DIM, _aten.diagonal.default), _part_of)


def _all_operators() -> list[Any]:
    names = (name.removeprefix("aten::").partition(".") for name in all_operators())
    return [
        getattr(getattr(_aten, name), overload or "default")
        for name, _, overload in names
        if "::" not in name and hasattr(_aten, name)
    ]


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    _parts.keep(op(_empty(tensor, kwargs), *rest, **kwargs), tensor)
    return tensor


def _like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    return _parts.placed(op(_empty(tensor, kwargs), *rest, **kwargs), tensor)


def _in_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = _dtensors((args, kwargs))[0]

    def one(op: Any, row: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _dtensors(row):
            return _in_full(op, row, kwargs)
        return tree_map_only(Tensor, lambda value: _parts.on_every_rank(value, tensor), op(*row, **kwargs))

    if _parts.has_several(op, args):
        return _parts.one_by_one(one, op, args, kwargs)
    return _on_full_tensors(op, args, kwargs, lambda value: _parts.placed(value, tensor))


def _on_full_tensors(op: Any, args: Any, kwargs: Any, result: Callable[[Tensor], Tensor]) -> Any:
    """``result`` of what it gives for full tensors, and what it writes to is written. All ranks call it."""
    device = _dtensors((args, kwargs))[0].device_mesh.device_type
    made: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}

    def full(each: Tensor) -> Tensor:
        if id(each) not in made:
            # A plain tensor is where the shards are: on the host, if they are offloaded. Kernels round by strides.
            made[id(each)] = _parts.laid_out(full_of(each), each) if isinstance(each, DTensor) else each.to(device)
            given[id(made[id(each)])] = each
        return made[id(each)]

    full_args, full_kwargs = tree_map_only(Tensor, full, (args, kwargs))
    out = op(*full_args, **full_kwargs)
    for each in _parts.written(op, args, kwargs):
        value = made[id(each)]
        if not isinstance(each, DTensor):
            if value is not each:
                each.copy_(value)
        elif _parts.is_partial(each):  # A sum or norm that was not reduced yet can't keep what is no sum or norm.
            settled = _parts.placed(value, each)
            each._local_tensor, each._spec = settled._local_tensor, settled._spec
        elif _parts.sharded_dims(each) or each.to_local().device != value.device:
            _parts.keep(value, each)
    return tree_map_only(Tensor, lambda value: given[id(value)] if id(value) in given else result(value), out)


def _dtensors(given: Any) -> list[DTensor]:
    return [each for each in tree_leaves(given) if isinstance(each, DTensor)]


def _in_a_hook(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch has no strategy for, or refuses for plain tensors beside DTensors, on full tensors."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.ndim]
    sharded = _dtensors(given)
    to_plain = any(not isinstance(each, DTensor) for each in _parts.written(op, args, kwargs))
    if not to_plain and len(sharded) in (0, len(given)):
        return _own_or_in_full(op, args, kwargs)
    if _parts.has_several(op, args):
        return _parts.one_by_one(_in_a_hook, op, args, kwargs)
    pointwise = op.name().startswith("aten::_foreach_") or torch.Tag.pointwise in op.tags or op in _POINTWISE_TOO
    fitting = _as_placed(op, args, kwargs) if pointwise else None
    if fitting is not None:
        return _own_or_in_full(op, *fitting)
    # Each rank's own, as activations are.
    device = _dtensors((args, kwargs))[0].to_local().device
    return _on_full_tensors(op, args, kwargs, lambda value: value.to(device))


def _noted(handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    InFull.wrote = True
    return handler(op, args, kwargs)


def _in_a_step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    differentiable = any(each.requires_grad for each in _dtensors((args, kwargs)))
    taken = [isinstance(e, DTensor) or not (e.ndim or differentiable) for e in _parts.written(op, args, kwargs)]
    return (_in_a_hook if any(taken) else _own_or_in_full)(op, args, kwargs)


def _as_placed(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with plain tensors sharded as a DTensor is that has the result's shape, if one has."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    try:
        shape = torch.broadcast_shapes(*(each.shape for each in given))
    except RuntimeError:
        return None
    like = next((each for each in _dtensors(given) if each.shape == shape), None)
    if like is None or not all(isinstance(each, DTensor) for each in _parts.written(op, args, kwargs)):
        return None

    def fit(each: Tensor) -> Tensor:
        return each if isinstance(each, DTensor) or not each.ndim else _parts.placed(each.expand(shape), like)

    return tree_map_only(Tensor, fit, (args, kwargs))


def _part_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view; of a sharded dimension one of the full tensor, which writes through."""
    tensor, *rest = args
    sharded = _parts.sharded_dims(tensor)
    if op is _aten.diagonal.default:
        touched = bool(sharded)
    else:
        dim = (args[_OF_DIM[op]] if len(args) > _OF_DIM[op] else 0) % tensor.ndim
        everything = (
            op is _aten.slice.Tensor and op(torch.empty(tensor.shape, device="meta"), *rest).shape == tensor.shape
        )
        touched = dim in sharded and not everything
    return _of_full(op, args, kwargs) if touched else _own(op, args, kwargs)


def _viewed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _own(op, args, kwargs)
    except RuntimeError:  # It would mix rows of two ranks, or has no strategy; the same on all.
        tensor, size, *rest = args
        if op is _aten.as_strided.default:
            offset = rest[1] if len(rest) > 1 else kwargs.get("storage_offset")
            # Of the shard's storage, which may be part of a unit's.
            rest, kwargs = [rest[0], 0 if offset is None else offset - tensor.storage_offset()], {}
        return _of_full(op, (tensor, size, *rest), kwargs)


def _own(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does."""
    handlers = _take(None)
    handler = handlers.pop(op)
    if op in InFull.torchs:
        handlers[op] = InFull.torchs[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _own_or_in_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # An empty shard has no largest element.
    if op in _NORMS and math.isinf(args[1] if len(args) > 1 else 2) and _dtensors(args):
        return _in_full(op, args, kwargs)
    try:
        return _own(op, args, kwargs)
    except RuntimeError as error:
        # It has no strategy; or of what is offloaded: torch would send it from the host, where NCCL has no backend.
        if not isinstance(error, NotImplementedError) and _CAN_NOT.search(str(error)) is None:
            raise
    return (_of_full if op.is_view else _in_full)(op, args, kwargs)


def _of_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    source = Source(tensor)
    return tree_map_only(
        Tensor, lambda part: _parts.on_every_rank(Part(part, source), tensor), op(source.full, *rest, **kwargs)
    )


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Torch would make each shard an identity of its own."""
    return _fill(lambda full: full.zero_().fill_diagonal_(1), (kwargs["out"],), {})


def _empty(tensor: DTensor, kwargs: dict[str, Any]) -> Tensor:
    # Of a shard that is kept on the host the numbers are the device's too, as where nothing is offloaded.
    generator = kwargs.get("generator")
    device = tensor.device_mesh.device_type if generator is None else generator.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


_OF_PARTS = (_in_full, _part_of, _viewed)
