"""What the Trainer, the optimizer and the model say: "auto" values of a configuration come from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_shard.engines.engine import PlannedRun, Run, TrainerFacts


@dataclass(frozen=True, kw_only=True)
class RunFacts(PlannedRun):
    """What the configuration of a run may ask for; ``optimizer`` has a ``type`` where an optimizer exists."""

    trainer: TrainerFacts = field(default_factory=TrainerFacts)

    total_steps: int | None = None  # Optimizer steps of the whole fit, where they are known.
    hidden_size: int | None = None  # The model's hidden size, the largest of several, where its configuration says it.
    number_of_parameters: int | None = None  # Elements of all parameters, unsharded.


def run_facts(module: nn.Module, run: Run, optimizers: Iterable[Any], *, count_steps: bool = False) -> RunFacts:
    """The facts of a run whose optimizers are made; ``module`` may be sharded. All ranks call it.

    ``count_steps`` asks for the number of optimizer steps, which sets up the training data.
    """
    trainer = run.trainer
    # In manual optimization only the user's code knows; above 1 DeepSpeed keeps the memory that adding up under
    # offload takes.
    accumulate = trainer.accumulate_grad_batches if run.automatic else max(2, trainer.accumulate_grad_batches)
    return planned_facts(
        module,
        run.planned,
        device_type=run.device.type,
        trainer=trainer,
        accumulate_grad_batches=accumulate,
        optimizer=_optimizer_facts(optimizers),
        total_steps=trainer.total_steps() if count_steps else None,
    )


def planned_facts(module: nn.Module, run: PlannedRun, **others: Any) -> RunFacts:
    """The facts of a run that is planned only, with ``others`` in the place of its own fields."""
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
    return RunFacts(**{**vars(run), "hidden_size": hidden_size(module), "number_of_parameters": elements, **others})


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
            several = getattr(part, "hidden_sizes", None)
            sizes = [getattr(part, "hidden_size", None), *(several if isinstance(several, list | tuple) else [])]
            found += [size for size in sizes if isinstance(size, int)]
    return max(found, default=None)
