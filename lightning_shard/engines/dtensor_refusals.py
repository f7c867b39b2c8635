"""Refuse operators on a sharded DTensor that return wrong values, lose writes, or gather unseen.

``item()`` reads this rank's shard. On CPUs random fills draw the same numbers for each shard. A mean over uneven shards
is a mean of means. A row of a sharded dimension is a copy, so ``weight[0].zero_()`` changes nothing. Other operators
gather in the middle of an expression, which hangs under ``rank_zero_only``. Each raises on the calling rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.tensors.tracing import READ_NUMBER, schema_of, tree_leaves

require(DTensor, "_op_dispatcher")
_dispatcher: Any = DTensor._op_dispatcher
require(type(_dispatcher), "_custom_op_handlers")
require(torch.ops.aten, "_softmax _log_softmax _unique2 _index_put_impl_")

# Not ``equal``: torch returns the same on all ranks, and Lightning's finetuning callbacks call it on all.
_NUMBERS = "allclose"  # Besides ``item``, which also refuses the number of a norm or a sum over shards.

_RANDOM = (
    "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_ rand_like randn_like randint_like"
    " bernoulli multinomial native_dropout"
)
_WRITES = (
    "index_put_ _index_put_impl_ index_fill_ index_copy_ index_add_ index_reduce_ scatter_ scatter_add_ scatter_reduce_"
    " masked_scatter_ put_ fill_diagonal_ eye triu_ tril_ renorm_"
)
_PARTS = "select slice unbind split split_with_sizes diagonal unfold index index_select gather take masked_select"
_REDUCTIONS = (
    "any all argmax argmin var var_mean std median nanmedian kthvalue nonzero _unique2 sort topk cumsum cumprod"
    " flip roll _softmax _log_softmax"
)
_LOSSES = "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits"
CONTRACT = (
    "call tensor.full_tensor() on all ranks, or use lightning_shard.full_tensor(trainer, name) or "
    "lightning_shard.full_parameters(trainer, ...), on all ranks too (examples/guides/contract.md)"
)
ROOTS_UNIT = (
    "to use an embedding or a head in a step outside of its forward set units: [{modules: auto}] (with shard_fsdp), "
    "which leaves them to the root's unit"
)
BETWEEN_STEPS = (
    "write between steps, as in on_train_batch_start or on_train_batch_end, with "
    "lightning_shard.full_parameters(trainer, write=True) or set_full_tensor (examples/guides/contract.md, whose "
    "average_teacher is the momentum update of a teacher)"
)

_engines = 0
_replaced: dict[Any, Any] = {}  # The handlers, or None, of the refused operators.


def install_refusals() -> Callable[[], None]:
    """Refuse the operators in this process until the returned function is called."""
    global _engines
    handlers = _dispatcher._custom_op_handlers
    if _engines == 0:
        table = dict.fromkeys(_overloads(_RANDOM, _WRITES, _PARTS, _REDUCTIONS, _LOSSES), _along_shards)
        table |= dict.fromkeys([READ_NUMBER, *_overloads(_NUMBERS)], _of_all_ranks)
        table |= dict.fromkeys(_overloads("mean"), _mean)
        _replaced.update({op: handlers.get(op) for op in table})
        handlers.update(table)
    _engines += 1
    return _uninstall


def _uninstall() -> None:
    global _engines
    _engines -= 1
    if _engines == 0:
        for op, handler in _replaced.items():
            del _dispatcher._custom_op_handlers[op]
            if handler is not None:
                _dispatcher._custom_op_handlers[op] = handler
        _replaced.clear()


def is_full(tensor: DTensor) -> bool:
    """Whether this rank has the full ``tensor``."""
    return all(isinstance(placement, Replicate) or ranks == 1 for placement, ranks in _placed(tensor))


def _placed(tensor: DTensor) -> Iterator[tuple[Any, int]]:
    return zip(tensor.placements, tensor.device_mesh.shape, strict=True)


def _sharded_dims(tensor: DTensor) -> set[int]:
    return {placement.dim for placement, ranks in _placed(tensor) if isinstance(placement, Shard) and ranks > 1}


def _overloads(*names: str) -> Iterator[Any]:
    for name in " ".join(names).split():
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads())


def _dtensors(given: Any) -> list[DTensor]:
    return [each for each in tree_leaves(given) if isinstance(each, DTensor)]


def _of_all_ranks(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for tensor in _dtensors((args, kwargs)):
        if not is_full(tensor):
            raise _refusal(op, tensor)
    return _of_torch(op, args, kwargs)


def _along_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for tensor in _dtensors((args, kwargs)):
        if sharded := _sharded_dims(tensor) & _dims_of(op, args, kwargs, tensor.ndim):
            if op is torch.ops.aten.slice.Tensor and _takes_all(tensor.shape[sharded.pop()], *args[2:]):
                continue
            raise _refusal(op, tensor)
    return _of_torch(op, args, kwargs)


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allow means over even shards, which torch computes as a partial value without communication."""
    tensor = args[0]
    uneven = any(
        isinstance(placement, Shard) and tensor.shape[placement.dim] % ranks for placement, ranks in _placed(tensor)
    )
    return (_along_shards if uneven else _of_torch)(op, args, kwargs)


def _dims_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> set[int]:
    """The dimensions that an operator works along: its argument ``dim``, or all."""
    for index, argument in enumerate(schema_of(op).arguments):
        if argument.name in ("dim", "dims"):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = given if isinstance(given, list | tuple) else [] if given is None else [given]
            return {dim % ndim for dim in dims if ndim} or {*range(ndim)}
    return {*range(ndim)}


def _takes_all(size: int, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    return not start and (end is None or end >= size) and step == 1


def _of_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch's operator. The dispatcher can't bypass a handler, so the handler is removed during the call."""
    handlers = _dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    if _replaced[op] is not None:
        handlers[op] = _replaced[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _refusal(op: Any, tensor: DTensor) -> ConfigurationError:
    shown = "item() (a number, as by float, bool or if)" if op is READ_NUMBER else op.name().removeprefix("aten::")
    return ConfigurationError(
        f"{shown} of a DTensor of shape {tuple(tensor.shape)}, of which this rank has only a shard ("
        f"{', '.join(map(str, tensor.placements))}), would be wrong, lost, or wait for ranks that may not call it: "
        f"{CONTRACT}; {ROOTS_UNIT}."
    )
