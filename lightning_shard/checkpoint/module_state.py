"""A module's tensors and extra state under the names that a checkpoint knows them by."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.checkpoint.files.layout import listed
from lightning_shard.errors import CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import Names, fqns


def sharded_names(module: nn.Module) -> Names:
    """The names of a module, wrapped or not, with every FSDP module in its sharded state.

    In that state its parameters are the tensors that the optimizer steps. Names of before do not have those.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return fqns(module)


def live_tensors(names: Names, masters: Mapping[str, LiveTensor] | None = None) -> dict[str, LiveTensor]:
    """FQN to live tensor: trainable and frozen parameters and persistent buffers, each once.

    ``masters``: FQN, a tied one too, to what stands for the module's own tensor; ConfigurationError: it has none.
    """
    stand_ins = {names.canonical(fqn): master for fqn, master in (masters or {}).items()}
    return {**names.tensors, **stand_ins}


def extra_state(module: nn.Module, names: Names) -> dict[str, Any]:
    """What ``module.state_dict()`` has beyond parameters and persistent buffers, by name without wrappers.

    ``get_extra_state`` of modules and persistent states of torchmetrics are such things.
    """
    extra: dict[str, Any] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = names.unwrapped(key)
        if name not in names.tensors and name not in names.aliases:
            extra[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return extra


def load_extra_state(module: nn.Module, names: Names, extra: Mapping[str, Any], *, strict: bool = True) -> None:
    """Give `extra_state` back to a module that is wrapped in another way or not at all.

    Raises CheckpointMismatchError where ``strict`` and no module takes an entry.
    """
    if not extra:
        return
    keys = {names.unwrapped(key): key for key in module.state_dict(keep_vars=True)}
    unknown = [name for name in extra if name not in keys]
    if unknown and strict:
        raise CheckpointMismatchError(
            f"the checkpoint has extra state that no module takes: {listed(unknown)}; load with strict=False to "
            "leave it out"
        )
    module.load_state_dict({keys[name]: value for name, value in extra.items() if name in keys}, strict=False)
