"""Torch's private names for tracing: containers, dispatch modes, storages, counts of writes, operators."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch, _pytree

from lightning_shard.private_names import require

require(_pytree, "tree_leaves tree_map tree_map_only")
require(_python_dispatch, "TorchDispatchMode")
require(Tensor, "_version")

tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only
TorchDispatchMode = _python_dispatch.TorchDispatchMode


def operator(name: str) -> Any:
    """An operator by its name in torch's dispatcher, ``aten::mm``. torch keeps its schema compatible."""
    space, _, own = name.partition("::")
    require(getattr(torch.ops, space), own)
    return getattr(getattr(torch.ops, space), own)


GROUPED_PRODUCTS = operator("aten::_grouped_mm").default
READ_NUMBER = operator("aten::_local_scalar_dense").default  # The operator of ``tensor.item()``.

_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION, ATTENTION_BACKWARD = (
    [operator(f"aten::_scaled_dot_product_{kind}{direction}") for kind in _FUSED] for direction in ("", "_backward")
)
"""Fused kernels of attention on a CPU, and on GPUs."""
RECURRENT = (operator("aten::mkldnn_rnn_layer"), operator("aten::_cudnn_rnn"))
RECURRENT_BACKWARD = (operator("aten::mkldnn_rnn_layer_backward"), operator("aten::_cudnn_rnn_backward"))
"""Fused kernels over all time steps: an LSTM on a CPU, and recurrent modules on a GPU."""


def storage_key(tensor: Tensor) -> int:
    """The same number for all tensors, real or fake, that share a storage, until it is freed."""
    return id(tensor.untyped_storage())  # torch keeps the Python object until the memory is freed


def schema_of(operator: Any) -> Any:
    """An operator's arguments, and whether it writes to them. None of a higher-order operator."""
    return getattr(operator, "_schema", None)


def version(tensor: Tensor) -> int:
    """Autograd's count of writes to the tensor's memory, without reading the device. It counts no writes to
    ``tensor.data`` and none to inference tensors.
    """
    return 0 if tensor.is_inference() else tensor._version
