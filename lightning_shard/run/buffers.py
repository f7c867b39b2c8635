"""What a rank's own state keeps of persistent buffers in the middle of a validation, which runs again."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_shard.tensors.names import persistent_buffers

OWN = "buffers"


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the host of the persistent buffers of ``module``, by key."""
    return {key: buffer.detach().to("cpu", copy=True) for key, buffer in persistent_buffers(module)}


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write the values of ``saved``, by key, into the persistent buffers of ``module``."""
    for key, buffer in persistent_buffers(module):
        if key in saved and saved[key].shape == buffer.shape:
            # Lest a backward pass that is to come take it for changed.
            buffer.data.copy_(saved[key])
