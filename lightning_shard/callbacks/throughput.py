"""Measure a run's throughput over all ranks, for the progress bar, loggers, a table at the end and a CSV file."""

import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric, MetricCollection

from lightning_shard._lightning import Replacements, processes
from lightning_shard._lightning.loops import follow_actions
from lightning_shard._lightning.messages import print_above_bar
from lightning_shard.arguments import checked
from lightning_shard.devices import name_of
from lightning_shard.engines.memory_breakdown import is_sharded
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters import throughput_windows as meters
from lightning_shard.meters.flops import FlopCount, count_flops
from lightning_shard.meters.peaks import peak_flops
from lightning_shard.precision.policy import BITS
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.fake import meta_copy
from lightning_shard.tensors.names import class_name
from lightning_shard.text import first_line


class ThroughputCallback(Callback):
    """Logs ``tokens/s``, ``samples/s``, both also per device, ``step_seconds``, ``mfu``, waiting times and peak memory.

    Each value covers a window of optimizer steps. The work of all ranks is summed, and the time is the slowest rank's.
    Waiting for data is part of the time and is logged as ``data_share``. Validation and saving checkpoints are not part
    of it. Ranks exchange numbers once per window, so a step costs no collective and no wait for the device.

    The log and the table name the slowest rank and its node if it stands out. A rank's own time is the time in which it
    computes or waits for data, without waiting for other ranks. It stands out if it exceeds the median of the other
    ranks' by more than a fifth of the step. On GPUs this is the host's time, so a device that is slow by itself is not
    seen.

    If stderr is no terminal, as in a batch job, rank 0 prints a line for each window with the loss of its last batch.

    ``mfu`` is the model's FLOPs divided by the time and by the devices' dense peak FLOP/s in the compute dtype. torch
    counts the FLOPs of forward and backward on the module before it is sharded. Causal attention counts half, and
    recomputation does not count (`lightning_shard.meters.flops.count_flops`). The first batch is counted, and others in
    proportion to their tokens or samples. If the step can't be counted or the peak is unknown, ``mfu`` is left out and
    a line gives the reason.

    Attributes:
        windows: all windows, on every rank.
    """

    @checked("ThroughputCallback")
    def __init__(
        self,
        every_n_steps: int | None = None,
        tokens_key: str | int | None = None,
        mask_key: str | int | None = None,
        peak_tflops: float | None = None,
        mfu: bool = True,
        summary: bool = True,
        csv: str | None = None,
    ) -> None:
        """Set up the window.

        Args:
            every_n_steps: optimizer steps in a window. Default: the Trainer's ``log_every_n_steps``.
            tokens_key: name or index of the batch's entry with the tokens. Default: ``input_ids``, or the first integer
                tensor of two or more dims.
            mask_key: name or index of the batch's entry that marks padding by 0 or -100. Default: ``attention_mask``
                (0), else ``labels`` or another integer tensor of the tokens' shape (-100).
            peak_tflops: dense peak of one device in TFLOP/s, to add to the table or to override it.
            mfu: count the model's FLOPs.
            summary: print a table at the end.
            csv: file that gets a line for each window at the end. Default: ``throughput.csv`` in the logger's folder,
                or no file without a logger.

        Raises:
            ConfigurationError: the window is less than one step, or the peak is not positive.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}, but must be 1 or more.")
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigurationError(f"peak_tflops is {peak_tflops}, but must be greater than 0.")
        self.every_n_steps, self.tokens_key, self.mask_key = every_n_steps, tokens_key, mask_key
        self.peak_tflops, self.mfu, self.summary, self.csv = peak_tflops, mfu, summary, csv
        self.windows: list[meters.Window] = []
        self.flops, self._actions = StepFlops(), ActionClock()
        self._peak: float | None = None

    def before_sharding(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the module without its memory, to count a step. This package's strategies call it."""
        if self.mfu:
            self.flops.copy_module(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the module under strategies that do not call `before_sharding`."""
        if self.mfu and not hasattr(trainer.strategy, "memory"):
            self.flops.copy_module(pl_module)

    def _count_flops(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        device = trainer.strategy.root_device
        dtype, name = compute_dtype(trainer), name_of(device)
        self._peak = peak_flops(name, dtype) if self.peak_tflops is None else self.peak_tflops * 1e12
        if self._peak is None:
            bits = str(dtype).removeprefix("torch.")
            self.flops.why_not = f"the peak of {name!r} in {bits} is not known (set peak_tflops)"
        elif self.flops.copied is not None:
            self.flops.count_step(batch, batch_idx, device=device)
        if self.flops.count is None:
            whose = class_name(trainer.lightning_module)
            rank_zero_info(f"ThroughputCallback: no MFU for {whose}: {self.flops.why_not}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's logger connector sets this attribute. It is 0 under `fast_dev_run`.
        self._every = self.every_n_steps or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        self._actions.leave_trainer()
        self._actions = ActionClock()
        self._actions.follow_trainer(trainer)
        self._nodes: dict[int, str] = {}
        self.windows = []
        self._peak = None
        self._first: float | None = None
        self._counted = False
        # The clocks at the end of the last batch. None: something other than training follows it.
        self._mark: tuple[float, float, float] | None = None
        self._begin_window(trainer)

    def _begin_window(self, trainer: Trainer) -> None:
        self._first_step = trainer.global_step
        self._window = meters.RankWindow()
        self._padding: list[Tensor] = []
        self._blocked = self._actions.seconds[CHECKPOINT]

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds now, seconds spent waiting for data, and seconds spent waiting for other ranks."""
        return time.perf_counter(), self._actions.seconds[DATA], self._actions.waiting.seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._counted:
            self._counted = True
            if self.mfu:
                self._count_flops(trainer, batch, batch_idx)
            self._mark = None
        if self._mark is None:
            self._mark = self._clocks()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._actions.waiting.mark_backward_end(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._actions.waiting.count_backward_tail()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch. At the end of a window, exchange it with all ranks and log it."""
        self._add_batch(batch)
        if trainer.global_step - self._first_step < self._every:
            self._add_time()
            return
        window = self._end_window(trainer)
        if window is not None:
            log_window(pl_module, window, on_cpu=trainer.strategy.root_device.type == "cpu")
            if trainer.is_global_zero and not (sys.stderr.isatty() or hasattr(sys, "ps1")):
                # A batch job's log gets lines in place of a progress bar.
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
                # A loss with a weight may be a sum.
                loss = trainer.callback_metrics.get("weighted_loss", loss)
                rank_zero_info(meters.window_line(window, None if loss is None else float(loss)))

    def _add_batch(self, batch: Any) -> None:
        samples, tokens, real = meters.batch_size(batch, tokens_key=self.tokens_key, mask_key=self.mask_key)
        items = samples if tokens is None else tokens
        self._window.samples += samples
        self._window.tokens += tokens or 0
        if real is None:
            self._window.real_tokens += tokens or 0
        else:
            # Read at the window's end, because the device may not have computed it yet.
            self._padding.append(real)
        if self.flops.count is not None:
            self._first = self._first or items
            self._window.flops += self.flops.count.total * (items / self._first if self._first else 1)

    def _add_time(self) -> None:
        now = self._clocks()
        if self._mark is not None:
            seconds, data, peers = (end - start for end, start in zip(now, self._mark, strict=True))
            self._window.seconds += seconds
            self._window.data_seconds += data
            self._window.peer_seconds += peers
        self._mark = now

    def _end_window(self, trainer: Trainer) -> meters.Window | None:
        """Combine the window over all ranks, which all call this, and begin the next one."""
        device = trainer.strategy.root_device
        if device.type != "cpu":
            # Include the device's work in the time, not its launches alone.
            with self._actions.waiting.counted():
                torch.accelerator.synchronize(device)
        if self._padding:
            self._window.real_tokens += float(torch.stack(self._padding).sum())
        self._add_time()
        self._window.checkpoint_seconds = self._actions.seconds[CHECKPOINT] - self._blocked
        self._window.allocated, self._window.reserved = meters.peak_bytes(device)
        rows = meters.gather_rows(astuple(self._window), dtype=torch.float64, device=device)
        found, step = trainer.callback_metrics.get("grad_norm"), trainer.global_step
        ranks, norm = [meters.RankWindow(*row) for row in rows], None if found is None else float(found)
        window = meters.combine(ranks, step=step, steps=step - self._first_step, peak=self._peak, grad_norm=norm)
        self._begin_window(trainer)
        if window is not None:
            if window.stands_out:  # The same on all ranks, so all enter the broadcast.
                rank = window.slowest_rank
                if first := rank not in self._nodes:
                    self._nodes[rank] = Ranks.of().broadcast(socket.gethostname(), rank)
                window = replace(window, slowest_node=self._nodes[rank])
                if first:
                    print_above_bar(trainer, f"Slowest: {meters.slowest_line(window)}.")
            self.windows.append(window)
        return window

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._mark = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._first_step:
            self._end_window(trainer)
        folder = trainer.log_dir if trainer.loggers else None
        self._path = Path(self.csv) if self.csv is not None else Path(folder) / "throughput.csv" if folder else None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        blocked = self._actions.seconds[CHECKPOINT]
        self._actions.leave_trainer()
        if not self.windows or not trainer.is_global_zero:
            return
        if self._path is not None:
            meters.write_csv(self.windows, self._path)
        if self.summary:
            on_cpu = trainer.strategy.root_device.type == "cpu"
            where = f"\nwindows: {self._path}" if self._path is not None else ""
            rank_zero_info(meters.summary_table(self.windows, blocked=blocked, on_cpu=on_cpu) + where)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._actions.leave_trainer()


DATA = ".train_dataloader_next"  # Waiting for the next training batch. The name begins with the loop's.

CHECKPOINT = "save_checkpoint"


class ActionClock:
    """Sums up the seconds of the profiled actions `DATA` and `CHECKPOINT`, with any profiler."""

    def __init__(self) -> None:
        self.seconds = {DATA: 0.0, CHECKPOINT: 0.0}
        self.waiting = meters.WaitClock()
        self._replacements = Replacements()
        self._leave: Callable[[], None] = lambda: None

    def follow_trainer(self, trainer: Trainer) -> None:
        """Time the actions of ``trainer`` until `leave_trainer`. `DATA` excludes waiting for other ranks."""
        self.waiting.start_timing()
        self._leave = follow_actions(self._replacements, trainer, (partial(self._add, -1), partial(self._add, 1)))

    def _add(self, sign: int, name: str) -> None:
        # The names of hooks inside a save also end in `save_checkpoint`, so that one is compared whole.
        action = DATA if name.endswith(DATA) else name
        if action in self.seconds:
            waited = self.waiting.seconds if action == DATA else 0.0
            self.seconds[action] += sign * (time.perf_counter() - waited)

    def leave_trainer(self) -> None:
        self._leave()
        self._leave = lambda: None
        self._replacements.restore()
        self.waiting.stop_timing()


def log_window(module: LightningModule, window: meters.Window, *, on_cpu: bool) -> None:
    """Log a window's values. All ranks call it with equal values."""
    tokens, each = window.tokens_per_second, window.tokens_per_second_per_device
    values = {
        "tokens/s": None if tokens is None else round(tokens),
        "tokens/s_per_device": None if each is None else round(each),
        "padding_share": window.padding_share,
        "samples/s": window.samples_per_second,
        "samples/s_per_device": window.samples_per_second_per_device,
        **{name: getattr(window, name) for name in ("step_seconds", "data_share", "checkpoint_seconds", "mfu")},
        "slowest/rank": float(window.slowest_rank) if window.devices > 1 else None,
        "slowest/lag_seconds": window.lag_seconds if window.devices > 1 else None,
        "memory/rank": float(window.largest_rank),
        f"memory/{'resident' if on_cpu else 'allocated'}_gib": window.allocated / 2**30,
        "memory/reserved_gib": None if on_cpu else window.reserved / 2**30,
    }
    for name, value in values.items():
        if value is not None:
            module.log(name, value, prog_bar=name in ("mfu", "samples/s" if tokens is None else "tokens/s"))


class StepFlops:
    """Counts the FLOPs of one training step on a copy, without memory, of the unsharded module."""

    def __init__(self) -> None:
        self.count: FlopCount | None = None
        self.why_not: str | None = "the module was sharded before it could be copied"
        self.copied: LightningModule | None = None  # Until it is counted.

    def copy_module(self, module: LightningModule) -> None:
        self.count, self.copied, self.why_not = None, None, None
        if not module.automatic_optimization:
            self.why_not = "its training_step optimizes manually"
        elif any(map(is_sharded, module.parameters())):
            self.why_not = "its parameters are sharded already"
        else:
            try:
                self.copied = without_side_effects(meta_copy(module))
            except Exception as error:
                self.why_not = f"it can't be copied ({first_line(error)})"

    def count_step(self, batch: Any, batch_idx: int, *, device: torch.device) -> None:
        """Count a step on ``batch``. Set ``count``, or ``why_not`` if that fails."""
        module, self.copied = self.copied, None
        assert module is not None
        processes.set_device(module, device)
        try:
            self.count = count_flops(lambda m, inputs: m.training_step(inputs, batch_idx), module, batch, device=device)
        except Exception as error:
            self.why_not = f"its training_step does not run without values ({first_line(error)})"


def without_side_effects(module: LightningModule) -> LightningModule:
    """Stop a module without values in its tensors from logging and from updating metrics."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for part in list(module.modules()):
        if isinstance(part, LightningModule):
            vars(part).update(log=nothing, log_dict=nothing, print=nothing)
        if isinstance(part, Metric | MetricCollection):
            empty = isinstance(part, MetricCollection)
            value: Any = (lambda *args, **kwargs: {}) if empty else (lambda *args, **kwargs: torch.zeros(()))
            vars(part).update(forward=value, compute=value, update=nothing, reset=nothing)
    return module


def compute_dtype(trainer: Trainer) -> torch.dtype:
    """The dtype of products, by this package's policy or by the Trainer's precision under another strategy."""
    policy = getattr(trainer.strategy, "policy", None)
    if policy is not None:
        return policy.products
    return BITS.get(str(trainer.precision).split("-")[0], torch.float32)
