"""What DeepSpeed's configuration may ask of a run, an optimizer and a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.zero.config import DeepSpeedFields, RunFacts
from lightning_shard.engines.zero.config.merging import get, merge
from lightning_shard.engines.zero.config.reading import AUTO


def run_facts(module: nn.Module, run: Run, optimizers: Iterable[Any], *, count_steps: bool = False) -> RunFacts:
    """The facts of a run whose optimizers are made. All ranks call it.

    Args:
        module: with full parameters, or sharded by an earlier run.
        run: the run.
        optimizers: of a fit.
        count_steps: whether the number of optimizer steps is asked for, which sets up the training data for it.
    """
    trainer = run.trainer
    # In manual optimization only the user's code knows; above 1 DeepSpeed keeps the memory that adding up under
    # offload takes.
    accumulate = trainer.accumulate_grad_batches if run.automatic else max(2, trainer.accumulate_grad_batches)
    return RunFacts(
        world_size=run.planned.ranks,
        device_type=run.device.type,
        policy=run.policy,
        aligned=run.planned.aligned,
        micro_batch_size=trainer.micro_batch_size,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        optimizer=_optimizer_facts(optimizers),
        total_steps=trainer.total_steps() if count_steps else None,
        hidden_size=hidden_size(module),
        number_of_parameters=sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()),
    )


def planned_facts(module: nn.Module, run: PlannedRun) -> RunFacts:
    """The facts of a run that is planned only."""
    return RunFacts(
        world_size=run.ranks,
        device_type=run.device_type,
        policy=run.policy,
        aligned=run.aligned,
        accumulate_grad_batches=run.accumulate_grad_batches,
        optimizer=run.optimizer,
        hidden_size=hidden_size(module),
        number_of_parameters=sum(p.numel() for p in module.parameters()),
    )


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
