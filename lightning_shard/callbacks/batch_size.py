"""Find the largest batch that fits, from the memory that steps with small batches take."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard._lightning.loaders import first_batch, forget_loaders, makes_loaders, trial_steps
from lightning_shard.arguments import checked
from lightning_shard.callbacks.memory_report import StepMeterCallback
from lightning_shard.callbacks.throughput import without_side_effects
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.throughput_windows import gather_rows, peak_bytes, size_text
from lightning_shard.planning.memory_trace import Step
from lightning_shard.tensors.fake import meta_copy
from lightning_shard.text import first_line

_STEPS = 2  # Per trial. The first makes the optimizer's state, which the second holds together with activations.


class BatchSizeCallback(Callback):
    """Sets the largest batch size that fits at the start of a fit, on every engine and the same on all ranks.

    Two steps of a first batch size and two of twice that size (half, if twice would not fit) are measured. A line
    through both predicts the largest batch, and two steps with half of that are measured as well. If a step can be
    traced without data, as ``lightning-shard plan`` does, the first size is a quarter of the plan's largest batch. Only
    the first trial may come near the limit, because a rank that runs out of memory leaves the others in a collective.
    Afterwards model, optimizers, random numbers and the order of the data are as before. A resumed fit measures too,
    but uses the batch size in its checkpoint.

    Attributes:
        found: the batch size, None before a fit.
        measured: the fullest rank's bytes by batch size, for each trial.
    """

    @checked("BatchSizeCallback")
    def __init__(
        self,
        limit: int | None = None,
        *,
        margin: float = 0.1,
        largest: int = 8192,
        keep_global_batch: bool = False,
        attribute: str = "batch_size",
    ) -> None:
        """Choose the attribute to set and its limits.

        Args:
            limit: bytes per rank. Default: the device's memory that other processes have not taken. Required on a CPU,
                for which the bytes of tensors are counted.
            margin: share of the limit to leave free, for memory outside of tensors and for larger batches.
            largest: greatest batch size to set.
            keep_global_batch: set ``accumulate_grad_batches`` so that a step takes as many samples as before, with the
                largest batch size that allows it.
            attribute: name of the batch size that ``train_dataloader`` reads from the LightningModule, its
                hyperparameters or the datamodule. Its value is the first trial if the step can't be planned.

        Raises:
            ConfigurationError: a value is out of range.
        """
        if not 0 <= margin < 1 or largest < 1 or (limit is not None and limit < 1):
            shown = f"limit is {limit}, margin {margin} and largest {largest}"
            raise ConfigurationError(f"{shown}, but margin must be from 0 to below 1, and the others 1 or more.")
        self.limit, self.margin, self.largest, self.attribute = limit, margin, largest, attribute
        self.keep_global_batch = keep_global_batch
        self.found: int | None = None
        self.measured: dict[int, int] = {}
        self._accumulate = 1
        self._copy: LightningModule | None = None

    def before_sharding(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the module without its memory, to plan a step. This package's strategies call it."""
        with suppress(Exception):
            self._copy = without_side_effects(meta_copy(pl_module))

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "accumulate": self._accumulate}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Use the batch size that the resumed run found."""
        if (state := checkpoint.get("callbacks", {}).get(self.state_key)) is not None:
            self.found, self._accumulate = state["found"], state["accumulate"]
            self._apply(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search for the batch size. All ranks call it. Lightning loads a checkpoint to resume from later.

        Raises:
            ConfigurationError: the run has no batch size that can be set or measured.
        """
        self._check_run(trainer, pl_module)
        self._search(trainer, pl_module)
        self._apply(trainer, pl_module)

    def _apply(self, trainer: Trainer, module: LightningModule) -> None:
        lightning_setattr(module, self.attribute, self.found)
        trainer.accumulate_grad_batches = self._accumulate
        forget_loaders(trainer)

    def _check_run(self, trainer: Trainer, module: LightningModule) -> None:
        if getattr(trainer.strategy, "memory", None) is None:
            raise ConfigurationError("BatchSizeCallback needs a strategy of lightning_shard, such as shard_fsdp.")
        if not makes_loaders(trainer) or not lightning_hasattr(module, self.attribute):
            raise ConfigurationError(
                f"BatchSizeCallback sets {self.attribute!r}, which neither module, hyperparameters nor datamodule "
                "have, or loaders were passed to fit. Let train_dataloader() make its loader with self."
                f"{self.attribute}."
            )
        if not module.automatic_optimization:
            raise ConfigurationError("BatchSizeCallback can't measure steps of manual optimization. Remove it.")
        if self.limit is None and trainer.strategy.root_device.type == "cpu":
            raise ConfigurationError("limit is not set, but a CPU has no memory of its own. Set limit, in bytes.")

    def _search(self, trainer: Trainer, module: LightningModule) -> None:
        given: Any = lightning_getattr(module, self.attribute)
        start = int(given)
        device, samples = trainer.strategy.root_device, start * trainer.accumulate_grad_batches
        if (limit := self.limit) is None:  # free memory, and memory that torch has reserved already
            limit = torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device)
        limit, self.measured = int((1 - self.margin) * limit), {}
        with trial_steps(trainer) as run:
            batch, most = first_batch(trainer)
            size: int | None = self._first_trial(trainer, batch, limit, min(most, self.largest)) or start
            while size is not None:
                lightning_setattr(module, self.attribute, size)
                meter = _TrialMeter()
                run(meter, _STEPS)
                rows = gather_rows([meter.bytes, limit], dtype=torch.int64, device=device)
                self.measured[size], limit = max(row[0] for row in rows), min(row[1] for row in rows)
                found = min(largest_that_fits(self.measured, limit), most, self.largest)
                size = next_trial(self.measured, found)
        if found < 1:
            raise ConfigurationError(
                f"Not a batch of 1 fits: one of {min(self.measured)} takes {size_text(min(self.measured.values()))} of "
                f"{size_text(limit)} per rank. `lightning-shard plan --compare` shows settings that take less."
            )
        self.found, self._accumulate = found, trainer.accumulate_grad_batches
        if self.keep_global_batch:
            self.found, self._accumulate = split_samples(samples, found)
        taken = f"{size_text(largest_line(self.measured, self.found))} of {size_text(limit)} per rank"
        rank_zero_info(f"{self.attribute}: {self.found} with accumulate_grad_batches {self._accumulate}, {taken}")

    def _first_trial(self, trainer: Trainer, batch: Any, limit: int, most: int) -> int:
        """A quarter of the plan's largest batch, the least of all ranks. 0: the step can't be planned."""
        planned, copy, strategy = 0, self._copy, cast(Any, trainer.strategy)
        self._copy = None
        try:
            assert copy is not None, "the module can't be copied"
            checkpointing = strategy.activation_checkpointing
            own = Step(training_step=lambda b: copy.training_step(b, 0), batch=batch, checkpointing=checkpointing)
            largest = strategy.memory.largest_batch(copy, own, trainer.optimizers, limit)
            planned = 0 if largest is None else max(1, min(largest // 4, most))
        except Exception as error:
            rank_zero_info(f"BatchSizeCallback: the first trial is not planned ({first_line(error)}).")
        rows = gather_rows([planned], dtype=torch.int64, device=trainer.strategy.root_device)
        return int(min(row[0] for row in rows))


def split_samples(samples: int, largest: int) -> tuple[int, int]:
    """The largest batch size up to ``largest`` that divides ``samples``, and the number of its batches."""
    size = next(size for size in range(min(largest, samples), 0, -1) if samples % size == 0)
    return size, samples // size


def next_trial(measured: Mapping[int, int], found: int) -> int | None:
    """The batch size to measure next, or None after the last trial. ``found`` fits according to ``measured``."""
    first = next(iter(measured))
    size = found // 2
    if len(measured) == 1:
        size = 2 * first if found >= 2 * first else first // 2
    return size if size > 0 and (len(measured) == 1 or (len(measured) == 2 and size > max(measured))) else None


def largest_line(measured: Mapping[int, int], size: int) -> float:
    """Bytes at a batch ``size`` on the line through the two largest sizes of ``measured``, or through one and 0."""
    (a, one), (b, two) = [(0, 0), *sorted(measured.items())][-2:]
    return one + max(0, two - one) / (b - a) * (size - a)


def largest_that_fits(measured: Mapping[int, int], limit: int) -> int:
    """The largest batch size whose bytes on `largest_line` are within ``limit``."""
    fixed = largest_line(measured, 0)
    slope = largest_line(measured, 1) - fixed
    return int((limit - fixed) // slope) if slope > 0 else max(measured) * 2**20


class _TrialMeter(StepMeterCallback):
    """Measures the last step of a trial, by torch's peak on a GPU and by the memory account on a CPU."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 < trainer.fit_loop.epoch_loop.max_steps or self._meter is not None:
            return
        if (device := trainer.strategy.root_device).type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        else:
            self._meter = trainer.strategy.memory.step_meter()  # type: ignore[attr-defined]
            self._meter.watch_forward()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.fit_loop.epoch_loop.max_steps:
            counted = 0 if self._meter is None else self._meter.count_resident().device.total
            self.bytes = counted or peak_bytes(trainer.strategy.root_device)[0]
