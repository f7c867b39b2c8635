"""Refusing modules whose parameters another engine has sharded."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.errors import ConfigurationError


def refuse_sharded(module: nn.Module, strategy: str, *, by_fsdp: bool = True, by_zero: bool = True) -> None:
    """Refuse a module that FSDP2 or ZeRO-3 has sharded.

    Raises:
        ConfigurationError: with what to do.
    """
    if by_fsdp and any(isinstance(m, FSDPModule) for m in module.modules()):
        raise ConfigurationError(
            f"{strategy} needs a module with full parameters, but this one was sharded with FSDP2, by an earlier run "
            "or in configure_model. Build a new module, or use shard_fsdp."
        )
    # The mark that DeepSpeed leaves on a parameter, asked for without importing it.
    if by_zero and any(hasattr(p, "ds_tensor") for p in module.parameters()):
        raise ConfigurationError(
            f"{strategy} needs a module with full parameters, but those of this one were sharded by ZeRO-3, in an "
            "earlier run or by deepspeed.zero.Init. Build a new module, and load the earlier run's checkpoint with "
            "ckpt_path; or use shard_deepspeed_stage_3."
        )
