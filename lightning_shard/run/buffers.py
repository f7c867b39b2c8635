"""What each rank's own state keeps of buffers: those that no ``state_dict`` has; and in the middle of a step, or of a
validation, which runs again, its own values of the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.run.averaging import Averaging
from lightning_shard.tensors.names import persistent_buffers
from lightning_shard.tensors.nonpersistent import Known, changed_buffers, load_buffers

_BUFFERS, _AVERAGES = "passing", "passing_averages"
OWN = "buffers"
OWN_AVERAGES = "averages_of_buffers"


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the host of the persistent buffers of ``module``, by key."""
    found = {key: buffer for key, _, buffer in persistent_buffers(module) if buffer is not None}
    return {key: buffer.detach().to("cpu", copy=True) for key, buffer in found.items()}


def buffer_state(module: nn.Module, known: Known | None, averaging: Averaging | None) -> dict[str, Any]:
    """Buffers with ``persistent=False`` that have changed since ``known``, and averages; none is swapped in."""
    changed = {} if known is None else changed_buffers(module, known)
    averages = {} if averaging is None else averaging.buffers()
    kept = {name: averages[name].cpu().clone() for name, b in changed.items() if name in averages and b is not None}
    return {_BUFFERS: changed, _AVERAGES: kept}


@torch.no_grad()
def set_buffers(module: nn.Module, averaging: Averaging | None, own: Mapping[str, Any], device: torch.device) -> None:
    """Set what `buffer_state` put into this rank's ``own`` state; which begin anew is told."""
    if anew := load_buffers(module, own.get(_BUFFERS, {}), device):
        rank_zero_warn(
            f"Buffers with persistent=False that steps have changed begin anew: {', '.join(anew)}. They are in the "
            "checkpoint if they are plain tensors of at most 64 MiB in all. Register others as persistent."
        )
    averages = {} if averaging is None else averaging.buffers()
    for name, value in own.get(_AVERAGES, {}).items():
        if name in averages and averages[name].shape == value.shape:
            averages[name].copy_(value)


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write the values of ``saved``, by key, into the persistent buffers of ``module``."""
    for key, _, buffer in persistent_buffers(module):
        if buffer is not None and key in saved and saved[key].shape == buffer.shape:
            # Lest a backward pass that is to come take it for changed.
            buffer.data.copy_(saved[key])
