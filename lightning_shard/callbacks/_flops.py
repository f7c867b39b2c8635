"""Model FLOPs of a LightningModule's training step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric, MetricCollection

from lightning_shard import _lightning
from lightning_shard.engines.resident import is_sharded
from lightning_shard.meters.flops import FlopCount, count_flops
from lightning_shard.precision.policy import BITS
from lightning_shard.tensors.fake import meta_copy, put_on_device


class StepFlops:
    """Counts what one training step takes, on a copy without memory of the module as it was before sharding."""

    def __init__(self) -> None:
        self.count: FlopCount | None = None
        self.why_not: str | None = "the module was sharded before it could be copied"
        self._copy: LightningModule | None = None

    def copy(self, module: LightningModule) -> None:
        """Copy ``module`` while its parameters are whole."""
        self.count, self._copy, self.why_not = None, None, None
        if not module.automatic_optimization:
            self.why_not = "its training_step optimizes manually"
        elif any(map(is_sharded, module.parameters())):
            self.why_not = "its parameters are sharded already"
        else:
            try:
                self._copy = _without_side_effects(meta_copy(module))
            except Exception as error:
                self.why_not = f"it can't be copied ({_short(error)})"

    @property
    def ready(self) -> bool:
        """Whether there is a copy that was not counted yet."""
        return self._copy is not None

    def measure(self, batch: Any, batch_idx: int, *, device: torch.device) -> None:
        """Count a step on ``batch``; afterwards either ``count`` or ``why_not`` is set."""
        module, self._copy = self._copy, None
        assert module is not None

        def step() -> object:
            put_on_device(module, device)
            _lightning.set_device(module, device)
            return module.training_step(batch, batch_idx)

        try:
            self.count = count_flops(step)
        except Exception as error:
            self.why_not = f"its training_step does not run without values ({_short(error)})"


def _without_side_effects(module: LightningModule) -> LightningModule:
    """Let a copy log nothing and update no metric; it has no Trainer, since a copy never has."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for name in ("log", "log_dict", "print"):
        setattr(module, name, nothing)
    for part in list(module.modules()):
        if isinstance(part, Metric | MetricCollection):
            empty = isinstance(part, MetricCollection)
            value: Any = (lambda *args, **kwargs: {}) if empty else (lambda *args, **kwargs: torch.zeros(()))
            vars(part).update(forward=value, compute=value, update=nothing, reset=nothing)
    return module


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def compute_dtype(trainer: Trainer) -> torch.dtype:
    """What products are computed in: by this package's policy, or by the Trainer's precision under another strategy."""
    policy = getattr(trainer.strategy, "policy", None)
    if policy is not None:
        return policy.products
    return BITS.get(str(trainer.precision).split("-")[0], torch.float32)
