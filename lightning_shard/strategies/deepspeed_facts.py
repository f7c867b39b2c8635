"""What DeepSpeed's configuration may ask of a Trainer, an optimizer and a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from torch import nn

from lightning_shard import _lightning
from lightning_shard.engines.deepspeed_config import RunFacts

if TYPE_CHECKING:
    from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy


def run_facts(strategy: ShardDeepSpeedStrategy, trainer: Trainer) -> RunFacts:
    """The facts of a fit whose optimizers are made and whose parameters are whole."""
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
        hidden_size=hidden_size(module),
        # Of a module that an earlier run has cut, too.
        number_of_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()),
    )


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
