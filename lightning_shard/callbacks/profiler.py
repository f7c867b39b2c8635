"""Profile chosen steps with torch's profiler and write a trace for each rank, configured in YAML."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_shard.arguments import checked
from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require

# Documented with these names: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
require(torch.cuda.memory, "_record_memory_history _dump_snapshot")
_record_memory = torch.cuda.memory._record_memory_history

_SNAPSHOT_ENTRIES = 100_000  # The last allocations and frees in a snapshot, as many as in torch's own examples.


class ProfilerCallback(Callback):
    """Writes a trace of CPU and GPU in chosen optimizer steps to ``rank{N}-steps{A}-{B}.json.gz``, for each rank.

    Open the files at https://ui.perfetto.dev or in ``chrome://tracing``. Consecutive steps are one trace. The profiler
    also runs, and drops, the step before the first one, because it is slow to start. Other steps cost nothing.

    ``Trainer(profiler="pytorch")`` takes its steps from a Python function and names files by the local rank, so it
    can't be configured in YAML or used on several nodes. Use it for a table of operators.

    Attributes:
        files: the traces and snapshots that this rank wrote.
        communication: the shares of communication in this rank's last trace.
    """

    @checked("ProfilerCallback")
    def __init__(
        self,
        steps: list[int] | None = None,
        ranks: list[int] | None = None,
        folder: str | None = None,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        snapshots: bool = False,
    ) -> None:
        """Choose steps, ranks and contents of the traces.

        Args:
            steps: numbers of optimizer steps, from 1. Default: 10, 11 and 12.
            ranks: ranks that write. Default: all.
            folder: folder of the files. Default: ``profile`` in the logger's folder or else in ``default_root_dir``.
            shapes: record the operators' input shapes.
            stacks: record Python's stacks. This is slow.
            memory: record allocations in the trace.
            snapshots: also write ``rank{N}-steps{A}-{B}.pickle``, every allocation on the GPU with its stack, for
                https://docs.pytorch.org/memory_viz. CUDA only.

        Raises:
            ConfigurationError: there are no steps, or a number is below 1.
        """
        chosen = [10, 11, 12] if steps is None else steps
        if not chosen or min(chosen) < 1:
            raise ConfigurationError(f"steps is {chosen}, but must be numbers of optimizer steps, from 1 on.")
        self.steps = sorted(set(chosen))
        self.ranks, self.folder, self.shapes, self.stacks = ranks, folder, shapes, stacks
        self.memory, self.snapshots = memory, snapshots
        self.files: list[Path] = []
        self.communication: Communication | None = None
        self._profile: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._folder = Path(self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "profile")
        device = trainer.strategy.root_device.type
        self._on_cuda, self._last_step = device == "cuda", trainer.global_step
        self._stride = max(1, len(trainer.optimizers))  # Optimizer steps per batch, in manual optimization several.
        if self.snapshots and not self._on_cuda:
            why = f"snapshots is true, but memory snapshots are CUDA's, and this run is on {device}"
            rank_zero_info(f"ProfilerCallback: {why}. The traces are written.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._profile is None and (self.ranks is None or trainer.global_rank in self.ranks):
            first = next((step for step in self.steps if step > trainer.global_step), math.inf)
            ahead = (first - trainer.global_step - 1) // self._stride  # Batches before it.
            if ahead < 2:
                self._start_profile(int(first), int(ahead))

    def _start_profile(self, first: int, warmup: int) -> None:
        last = first
        while last + 1 in self.steps:
            last += 1
        self._span = first, last
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_cuda],
            schedule=schedule(wait=0, warmup=warmup, active=last - first + 1, repeat=1),
            on_trace_ready=self._write_trace,
            record_shapes=self.shapes,
            with_stack=self.stacks,
            profile_memory=self.memory,
        )
        self._profile.start()
        if self.snapshots and self._on_cuda:
            _record_memory(max_entries=_SNAPSHOT_ENTRIES)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        stepped, self._last_step = trainer.global_step - self._last_step, trainer.global_step
        self._stride = stepped or self._stride
        if stepped and self._profile is not None:
            self._profile.step()
            if trainer.global_step >= self._span[1]:
                self._stop_profile()

    def _write_trace(self, done: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        first, last = self._span
        name = f"rank{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}-steps{first}-{last}"
        trace = self._folder / f"{name}.json.gz"
        done.export_chrome_trace(str(trace))
        self.files.append(trace)
        self.communication = communication(done.events() or [])
        if self.snapshots and self._on_cuda:
            snapshot = self._folder / f"{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            self.files.append(snapshot)
        text = "" if self.communication is None else f" ({self.communication.text()})"
        rank_zero_info(f"ProfilerCallback: {trace}{text}")

    def _stop_profile(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
            if self.snapshots and self._on_cuda:
                _record_memory(enabled=None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the trace of steps that the run did not finish."""
        self._stop_profile()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the trace up to the error. The snapshot shows how memory ran out."""
        self._stop_profile()


# On devices, kernels of NCCL and RCCL ("ncclDevKernel_AllGather_RING_LL"). On the host, spans of gloo's collectives
# ("gloo:all_reduce") from start to end.
_COMMUNICATION = re.compile(r"^(nccl|rccl|gloo:)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Shares of the traced time on one rank, between 0 and 1."""

    share: float  # In which a collective ran.
    exposed: float | None  # In which a collective ran and no other kernel. None on a CPU: spans do not show waiting.

    def text(self) -> str:
        exposed = "" if self.exposed is None else f", {self.exposed:.1%} with no other kernel at the same time"
        return f"collectives ran in {self.share:.1%} of the traced time{exposed}"


def communication(events: Iterable[Any]) -> Communication | None:
    """The shares of communication in the time of ``torch.profiler.profile.events()``. None: nothing was traced."""
    found = list(events)
    kernels = [event for event in found if event.device_type != DeviceType.CPU]
    talking = _covered(e for e in kernels or found if _COMMUNICATION.match(e.name))
    times = [time for event in found for time in (event.time_range.start, event.time_range.end)]
    total = max(times, default=0.0) - min(times, default=0.0)
    if total <= 0:
        return None
    alone = _covered(kernels) - _covered(e for e in kernels if not _COMMUNICATION.match(e.name))
    return Communication(share=talking / total, exposed=alone / total if kernels else None)


def _covered(events: Iterable[Any]) -> float:
    total, until = 0.0, -math.inf
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
