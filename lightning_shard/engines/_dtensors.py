"""What torch asks each shard of a DTensor alone, asked of the full tensor: the one importer of its private dispatch.

torch draws random numbers of each shard by itself: on CPUs every rank the same ones for another part, and on GPUs
others than those of a tensor that is not sharded. So `nn.init` in a hook, or noise that is added to gradients, would
train another model. And the number that is read from a sum, a norm or ``any()`` of a DTensor is of this rank's shard.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from lightning_shard.private_names import require
from lightning_shard.tensors.full import own_part

require(DTensor, "_op_dispatcher", tested="torch 2.11 to 2.13")
require(type(DTensor._op_dispatcher), "_custom_op_handlers", tested="torch 2.11 to 2.13")
require(torch.ops.aten, "_local_scalar_dense", tested="torch 2.11 to 2.13")

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


def answer_in_full() -> Callable[[], None]:
    """Draw random numbers of DTensors, and read numbers from them, as of full tensors, until the result is called. Of
    what is drawn, with generators in the same state on all ranks, each rank keeps its part; the full tensor is there
    for the moment. To read a number (``item``, ``float``, ``if``) from what is not on every rank in full is a
    collective.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = dict.fromkeys(_FILL, _fill) | dict.fromkeys(_LIKE, _like) | dict.fromkeys(_OF_VALUES, _of_values)
    own |= {_aten.eye.out: _eye, _aten.eye.m_out: _eye}
    own = {op: handler for op, handler in own.items() if handlers.get(op) is not handler}  # Another fit's are there.
    # torch's own for argmin and argmax fails on the ranks whose shards are empty.
    replaced = {op: handlers[op] for op in own if op in handlers}
    handlers.update(own)

    def undo() -> None:
        for op in own:
            handlers.pop(op, None)
        handlers.update(replaced)

    return undo


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    with torch.no_grad():
        tensor.to_local().copy_(own_part(op(_empty(tensor, kwargs), *rest, **kwargs), tensor))
    return tensor


def _like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    return _placed(op(_empty(tensor, kwargs), *rest, **kwargs), tensor)


def _of_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    return tree_map_only(Tensor, lambda full: _placed(full, tensor), op(tensor.full_tensor(), *rest, **kwargs))


def _placed(full: Tensor, tensor: DTensor) -> DTensor:
    """As ``tensor`` is; on every rank in full what has another shape."""
    mesh, placements = tensor.device_mesh, list(tensor.placements)
    if full.shape != tensor.shape:
        return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = own_part(full, tensor).to(tensor.to_local().device)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Torch would make each shard an identity of its own."""
    return _fill(lambda full: full.zero_().fill_diagonal_(1), (kwargs["out"],), {})


def _empty(tensor: DTensor, kwargs: dict[str, Any]) -> Tensor:
    # Of a shard that is kept on the host the numbers are the device's too, as where nothing is offloaded.
    generator = kwargs.get("generator")
    device = tensor.device_mesh.device_type if generator is None else generator.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
