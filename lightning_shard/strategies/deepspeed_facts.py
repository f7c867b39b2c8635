"""What DeepSpeed's configuration may ask of a Trainer, an optimizer and a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from torch import nn

from lightning_shard import _lightning
from lightning_shard.engines.zero.config import DeepSpeedFields, RunFacts
from lightning_shard.engines.zero.config.merging import get, merge
from lightning_shard.engines.zero.config.reading import AUTO

if TYPE_CHECKING:
    from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy


def run_facts(strategy: ShardDeepSpeedStrategy, trainer: Trainer, *, count_steps: bool = False) -> RunFacts:
    """The facts of a fit whose optimizers are made and whose parameters are whole. All ranks call it.

    Args:
        strategy: of the run.
        trainer: of the run.
        count_steps: whether the number of optimizer steps is asked for, which sets up the training data for it.
    """
    module = trainer.lightning_module
    accumulate = trainer.accumulate_grad_batches
    if not module.automatic_optimization:
        # Only the user's code knows; above 1 DeepSpeed keeps the memory that adding up under offload takes.
        accumulate = max(2, accumulate)
    return RunFacts(
        world_size=trainer.world_size,
        device_type=strategy.root_device.type,
        policy=strategy.policy,
        aligned=strategy.aligned,
        micro_batch_size=_lightning.train_batch_size(trainer),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm"),
        optimizer=_optimizer_facts(strategy.optimizers),
        total_steps=_total_steps(trainer) if count_steps else None,
        hidden_size=hidden_size(module),
        # Of a module that an earlier run has cut, too.
        number_of_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()),
    )


def _total_steps(trainer: Trainer) -> int | None:
    """Optimizer steps of the whole fit; None: it has no end."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def asks_for_steps(fields: DeepSpeedFields) -> bool:
    """Whether a schedule of the configuration is as long as the fit (``total_num_steps: auto``)."""
    return get(merge(fields, []), "scheduler.params.total_num_steps") == AUTO


def _optimizer_facts(optimizers: Iterable[Any]) -> Mapping[str, Any] | None:
    for optimizer in optimizers:
        known = {k: optimizer.defaults.get(k) for k in ("lr", "betas", "eps", "weight_decay")}
        return {"type": type(optimizer).__name__, **{k: v for k, v in known.items() if v is not None}}
    return None


def hidden_size(root: nn.Module) -> int | None:
    """The largest hidden size that a Hugging Face style ``config`` of a module in ``root`` names, or None."""
    found: list[int] = []
    for module in root.modules():
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            size = getattr(part, "hidden_size", None)
            sizes = getattr(part, "hidden_sizes", None)
            found += [size] if isinstance(size, int) else []
            found += [s for s in sizes if isinstance(s, int)] if isinstance(sizes, list | tuple) else []
    return max(found, default=None)
