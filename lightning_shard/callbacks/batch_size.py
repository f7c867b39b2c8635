"""The largest batch that fits, by what steps with small ones were measured to take."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard._lightning.loaders import first_batch, forget_loaders, makes_loaders, trials
from lightning_shard.arguments import checked
from lightning_shard.callbacks.memory_report import MetersStep
from lightning_shard.callbacks.throughput import without_side_effects
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.throughput_windows import gather_rows, peak_bytes, size_text
from lightning_shard.planning.memory_trace import Step
from lightning_shard.tensors.fake import meta_copy
from lightning_shard.text import first_line

_STEPS = 2  # Of a trial: the first makes the optimizer's state, which lies beside the activations of the second.


class BatchSizeCallback(Callback):
    """Sets the largest batch size that fits at the start of a fit, on every engine and the same on all ranks.

    Two steps of a first batch size and two of twice as much (half, where that would not fit) are measured, and then two
    with half of what the line through both says. Where a step can be traced without data, as ``lightning-shard plan``
    does, the first is a quarter of the largest batch that the plan finds. No trial but the first comes near the limit,
    because memory that runs out on one rank leaves the others in a collective. Model, optimizers, random numbers and
    the order of the data are afterwards as they were. A resumed fit measures too, and goes on with what its checkpoint
    says.

    Attributes:
        found: the batch size; None before a fit.
        measured: batch size to the bytes of the fullest rank, of each trial.
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
        """Say what is set, and up to where.

        Args:
            limit: bytes per rank. Default: what the device has and others have not taken. Needed on a CPU, where the
                bytes of tensors are counted.
            margin: share of the limit to leave, for what is no tensor and for batches that take more.
            largest: batch size that is not exceeded.
            keep_global_batch: set ``accumulate_grad_batches`` so that a step takes as many samples as before, and of
                the batch sizes that allow it the largest.
            attribute: where the LightningModule, its hyperparameters or the datamodule have the batch size that their
                ``train_dataloader`` reads. Its value is the first trial where there is no plan.

        Raises:
            ConfigurationError: a value that can't be.
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
        """Copy the module without its memory, to plan a step on. This package's strategies call it."""
        with suppress(Exception):
            self._copy = without_side_effects(meta_copy(pl_module))

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "accumulate": self._accumulate}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with what the resumed run found."""
        if (state := checkpoint.get("callbacks", {}).get(self.state_key)) is not None:
            self.found, self._accumulate = state["found"], state["accumulate"]
            self._apply(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search; what is resumed from is known later. All ranks call it. ConfigurationError: not possible here."""
        self._check(trainer, pl_module)
        self._search(trainer, pl_module)
        self._apply(trainer, pl_module)

    def _apply(self, trainer: Trainer, module: LightningModule) -> None:
        lightning_setattr(module, self.attribute, self.found)
        trainer.accumulate_grad_batches = self._accumulate
        forget_loaders(trainer)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
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
        if (limit := self.limit) is None:  # what is free, or torch's own already
            limit = torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device)
        limit, self.measured = int((1 - self.margin) * limit), {}
        with trials(trainer) as run:
            batch, most = first_batch(trainer)
            size: int | None = self._first(trainer, batch, limit, min(most, self.largest)) or start
            while size is not None:
                lightning_setattr(module, self.attribute, size)
                watch = _Watch()
                run(watch, _STEPS)
                rows = gather_rows([watch.bytes, limit], dtype=torch.int64, device=device)
                self.measured[size], limit = max(row[0] for row in rows), min(row[1] for row in rows)
                found = min(largest_that_fits(self.measured, limit), most, self.largest)
                size = next_trial(self.measured, found)
        if found < 1:
            raise ConfigurationError(
                f"Not a batch of 1 fits: one of {min(self.measured)} takes {size_text(min(self.measured.values()))} of "
                f"{size_text(limit)} per rank. `lightning-shard plan --compare` says what takes less."
            )
        self.found, self._accumulate = self._settled(found, samples, trainer.accumulate_grad_batches)
        taken = f"{size_text(largest_line(self.measured, self.found))} of {size_text(limit)} per rank"
        rank_zero_info(f"{self.attribute}: {self.found} with accumulate_grad_batches {self._accumulate}, {taken}")

    def _settled(self, found: int, samples: int, accumulate: int) -> tuple[int, int]:
        if not self.keep_global_batch:
            return found, accumulate
        size = next(size for size in range(min(found, samples), 0, -1) if samples % size == 0)
        return size, samples // size

    def _first(self, trainer: Trainer, batch: Any, limit: int, most: int) -> int:
        """What is tried first: a quarter of the plan's largest batch, of the rank with the least; 0: not planned."""
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


def next_trial(measured: Mapping[int, int], found: int) -> int | None:
    """The batch size to measure next, where ``found`` fits by those that were; None: enough is known."""
    first = next(iter(measured))
    size = found // 2
    if len(measured) == 1:
        size = 2 * first if found >= 2 * first else first // 2
    return size if size > 0 and (len(measured) == 1 or (len(measured) == 2 and size > max(measured))) else None


def largest_line(measured: Mapping[int, int], size: int) -> float:
    """Bytes at a batch ``size`` on the line through the last two of ``measured``; a single one has no fixed part."""
    (a, one), (b, two) = [(0, 0), *sorted(measured.items())][-2:]
    return one + max(0, two - one) / (b - a) * (size - a)


def largest_that_fits(measured: Mapping[int, int], limit: int) -> int:
    """The largest batch size on that line within ``limit``."""
    fixed = largest_line(measured, 0)
    slope = largest_line(measured, 1) - fixed
    return int((limit - fixed) // slope) if slope > 0 else max(measured) * 2**20


class _Watch(MetersStep):
    """Measures the last step of a trial: torch's peak on a GPU, on a CPU what the memory account counts."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 < trainer.fit_loop.epoch_loop.max_steps or self._meter is not None:
            return
        if (device := trainer.strategy.root_device).type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        else:
            self._meter = trainer.strategy.memory.step_meter()  # type: ignore[attr-defined]
            self._meter.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.fit_loop.epoch_loop.max_steps:
            counted = 0 if self._meter is None else self._meter.stepped().device.total
            self.bytes = counted or peak_bytes(trainer.strategy.root_device)[0]
