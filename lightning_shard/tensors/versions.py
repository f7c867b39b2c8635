"""How often the memory of a tensor was written to, which sees in-place writes without reading the device."""

from torch import Tensor

from lightning_shard.private_names import require

require(Tensor, "_version")


def version(tensor: Tensor) -> int:
    """As autograd counts; what is written to ``tensor.data`` is not counted, and inference tensors count nothing."""
    return 0 if tensor.is_inference() else tensor._version
