"""Tokens per second and the time of a step, over all ranks, in the progress bar and the loggers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_shard.errors import ConfigurationError


def count_items(batch: Any) -> tuple[int, bool]:
    """How much a batch holds, and whether that is tokens.

    Tokens where there is an integer tensor of two or more dims, such as (batch, time): the elements of the first
    one. Else samples: the size of the first dim of the first tensor that has one; 0 where there is none. Tensors are
    looked for in mappings and sequences, in their order.
    """
    samples = 0
    for tensor in _tensors(batch):
        if tensor.ndim > 1 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            return tensor.numel(), True
        if not samples and tensor.ndim:
            samples = tensor.shape[0]
    return samples, False


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [tensor for item in batch for tensor in _tensors(item)]
    return []


class ThroughputCallback(Callback):
    """Logs ``tokens/s`` (``samples/s`` where a batch has no tokens) and ``step_seconds``.

    Both are means over a window of optimizer steps. The items of all ranks are summed; the time is up to where the
    slowest rank ends. Loading data is part of it; validation and saving checkpoints are not. The ranks meet once in a
    window, so a step costs no collective and no wait for the device.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        """Set up the window.

        Args:
            every_n_steps: optimizer steps in a window; default: the Trainer's ``log_every_n_steps``.

        Raises:
            ConfigurationError: a window of less than one step.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}, but must be 1 or more.")
        self.every_n_steps = every_n_steps
        self._latest: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first window."""
        # The attribute is set by Lightning's logger connector; 0 is `fast_dev_run`.
        self._window = self.every_n_steps or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        # perf_counter at the end of the batch before; None where something else than training lies in between.
        self._mark: float | None = None
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._first_step = trainer.global_step
        self._items = 0
        self._seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock, unless it runs since the batch before."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; at the end of a window meet the other ranks and log."""
        items, is_tokens = count_items(batch)
        self._items += items
        steps = trainer.global_step - self._first_step
        ends = steps >= self._window
        total = _sum_over_ranks(trainer, self._items) if ends else 0.0
        now = time.perf_counter()
        if self._mark is not None:
            self._seconds += now - self._mark
        self._mark = now
        if ends and self._seconds:
            pl_module.log("tokens/s" if is_tokens else "samples/s", round(total / self._seconds), prog_bar=True)
            pl_module.log("step_seconds", self._seconds / steps)
        if ends:
            self._begin(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._mark = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._mark = None


def _sum_over_ranks(trainer: Trainer, value: int) -> float:
    """The sum; reading it waits for the device, so that a clock read next sees the work and not its launches."""
    local = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(local, reduce_op="sum"))
