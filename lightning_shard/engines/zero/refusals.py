"""What DeepSpeed can't do, refused before training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import LBFGS, Optimizer

from lightning_shard.engines.zero.config import DeepSpeedFields, read_config
from lightning_shard.errors import ConfigurationError, PrecisionError


def refuse_16_bits(stage: int, compute: torch.dtype, precision: str) -> None:
    """Refuse stage 0 in 16 bits.

    Raises:
        PrecisionError: with what to use.
    """
    if stage == 0 and compute != torch.float32:
        raise PrecisionError(
            f"precision is {precision!r} with DeepSpeed stage 0, which sums and reduces gradients in 16 bits there. "
            "Use shard_ddp, which replicates everything as well and runs every precision, or '32-true'."
        )


def refuse_compiling(compile: bool, stage: int) -> None:
    """Refuse compiled blocks in stage 3.

    Raises:
        ConfigurationError: with what to use.
    """
    if compile and stage == 3:
        raise ConfigurationError(
            "compile is true with stage 3, but there DeepSpeed gathers parameters in hooks inside of each block, and a "
            "graph ends at every one. Use shard_fsdp, whose hooks are outside of its units, stage 2, or compile: false."
        )


def refuse_replicas(replicas: int) -> None:
    """Refuse a mesh with more than one copy of the model.

    Raises:
        ConfigurationError: with what to use.
    """
    if replicas > 1:
        raise ConfigurationError(
            f"mesh asks for {replicas} replicas, but DeepSpeed shards over all processes: its MiCS, which copied "
            "shards over nodes, was removed, and hpZ (zero_plus_plus.hpz_partition_size) only keeps a second copy "
            "of the parameters. Use shard_fsdp_hybrid, or remove replicate."
        )


def only_optimizer(optimizers: Sequence[Optimizer], fields: DeepSpeedFields) -> Optimizer | None:
    """The optimizer that configure_optimizers made; None: the configuration describes one.

    Raises:
        ConfigurationError: several, none at all, or one that needs a closure.
    """
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"configure_optimizers returns {len(optimizers)} optimizers, but DeepSpeed's engine steps one. "
            "Return one, with parameter groups where settings differ, or use shard_fsdp."
        )
    if optimizers and isinstance(optimizers[0], LBFGS):
        raise ConfigurationError(
            "configure_optimizers returns LBFGS, which evaluates the loss several times in a step, but DeepSpeed's "
            "engine steps without a closure. Use another optimizer, or shard_ddp."
        )
    if optimizers:
        return optimizers[0]
    if "optimizer" not in read_config(fields.config):
        raise ConfigurationError(
            "configure_optimizers returns none, and the DeepSpeed configuration has no optimizer section. Return "
            "an optimizer, or write the section: optimizer: {type: AdamW, params: {lr: 1.0e-4}}."
        )
    return None
