"""Requests to stop: signals that only set a flag, a time limit, and their exchange between ranks."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_shard.arguments import checked_fields
from lightning_shard.cluster.slurm_job import read_job
from lightning_shard.errors import ConfigurationError

NAMELESS = "local"  # The run's name if no launcher gave it one.
TIME_LIMIT = 255  # In place of a signal's number in `DelayedMax` when the time is nearly up.


@checked_fields("preemption")
@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """Settings for a fit that is told to stop: all ranks save together after the step, and the job is requeued."""

    signals: tuple[str, ...] = ("SIGUSR1", "SIGTERM")
    """Signals that ask for it. None of them ends the process by itself while a fit runs. An empty list leaves the
    Trainer's own handlers in place."""

    requeue: Literal["auto", "always", "never"] = "auto"
    """In a SLURM batch job: put it back into the queue (``scontrol requeue``) once the checkpoint is whole. "auto" does
    so unless the job is being cancelled (``scancel``)."""

    exit_code: int = 75
    """Exit code of the processes after the save. Not 0, so that a batch script can tell (75 is EX_TEMPFAIL), and
    torchrun starts them again."""

    seconds_before_limit: float | None = 90.0
    """In a SLURM job: save this long, plus the longest step and save so far, before its time limit. At most half of the
    time that it had at the start. null: wait for a signal."""

    save_seconds: float = 600.0
    """Time limit of the save. After it every process writes its stacks to stderr, and the job is requeued with the
    checkpoint that is there."""

    run: str | None = None
    """Name of the run, by which its checkpoints are found (``ckpt_path: auto``). Default: the SLURM job, with its array
    task and its step, or torchrun's ``--rdzv-id``. Give one to resume under another job id. The array task is added to
    it."""

    keep_batch: bool = False
    """On a resume with another number of ranks, change ``accumulate_grad_batches`` so that a step keeps its number of
    micro-batches over all ranks. If that does not divide by the ranks, a warning says that the step changes."""

    def __post_init__(self) -> None:
        known = {s.name for s in signal.Signals}
        for name in self.signals:
            if name not in known or name in ("SIGKILL", "SIGSTOP"):
                raise ConfigurationError(
                    f"preemption.signals has {name!r}, but a signal's name is needed that a process can handle, such "
                    "as SIGUSR1, SIGUSR2 or SIGTERM."
                )
        for field, least in (("save_seconds", 1), ("seconds_before_limit", 0)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigurationError(f"preemption.{field} is {value}, but must be {least} or more.")
        if not 1 <= self.exit_code <= 255:
            raise ConfigurationError(
                f"preemption.exit_code is {self.exit_code}, but must be from 1 to 255. With 0 the batch script would "
                "go on as if the training had ended."
            )
        if self.run is not None and (not self.run or set(self.run) & set("/\0") or self.run.startswith(".")):
            raise ConfigurationError(
                f"preemption.run is {self.run!r}, but must be a name that a folder can have, without '/' and not "
                "beginning with '.'."
            )


class Preempted(SystemExit):
    """Ends a process after the save, with the exit code. It is no failure of the training."""


def run_name(config: PreemptionConfig, environ: Mapping[str, str]) -> str:
    """The name under which this run's checkpoints are found, the same after a requeue."""
    job = read_job(environ)
    if config.run is not None:
        return config.run if job is None or job.array_task is None else f"{config.run}_{job.array_task}"
    if job is not None:
        return f"slurm-{job.label}-{'batch' if job.step is None else job.step}"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    return NAMELESS if elastic == "none" else f"torchrun-{elastic.replace('/', '_')}"


class SignalFlag:
    """Signal handlers that only set a flag, since a handler runs between any two lines of Python."""

    def __init__(self) -> None:
        self.received = 0  # The number of the last signal, 0 before the first.
        self._before: dict[int, Any] = {}

    def install_handlers(self, names: tuple[str, ...]) -> bool:
        """Install the handlers with the flag cleared. False in another thread than the main one, which can't."""
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return False
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)
        return True

    def restore_handlers(self) -> None:
        """Put back the handlers of before. May be called again."""
        while self._before:
            number, handler = self._before.popitem()
            # None: a handler in C, such as faulthandler's, which Python can't put back. This one stays then.
            if handler is not None and signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number


def release_signals() -> None:
    """Unblock the signals that ``lightning-shard`` blocked (`__main__`) until there were handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGUSR2])


class TimeLimit:
    """Tells one rank when to stop so that a save fits into the job's time left."""

    def __init__(self, seconds_left: Callable[[], float | None], seconds_before: float) -> None:
        """Ask ``seconds_left`` once, which gives None for no limit."""
        self._ask = seconds_left
        left = seconds_left()
        self.seconds_left = left
        self._end = None if left is None else time.monotonic() + left
        self.seconds_before = seconds_before if left is None else min(seconds_before, left / 2)

    def is_near(self, reserve: float = 0.0) -> bool:
        """Whether to stop now, with ``reserve`` seconds for a step and a save. Asks again then, since limits move."""
        if self._end is None or time.monotonic() + self.seconds_before + reserve < self._end:
            return False
        left = self._ask()
        if left is not None:
            self._end = time.monotonic() + left
        return time.monotonic() + self.seconds_before + reserve >= self._end


class DelayedMax:
    """The largest number of all ranks, all-reduced on the CPU while a step runs and known one call later. So all ranks
    learn at the same step that one was told to stop.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group`` has a CPU backend and all ranks, or is None for a single process."""
        self._group = group
        self._number = torch.zeros((), dtype=torch.int32)
        self._work: Any = None

    def __call__(self, number: int) -> int:
        """Give ``number`` (0: none) and get the largest of all ranks in the call before. All ranks call it."""
        if self._group is None:
            return number
        largest = self.wait_for_largest()
        self._number = torch.tensor(number, dtype=torch.int32)
        self._work = dist.all_reduce(self._number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return largest

    def wait_for_largest(self) -> int:
        """The largest number of the last call, with no reduction left running. All ranks call it."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._number)


def describe_reason(number: int) -> str:
    return "the time limit" if number == TIME_LIMIT else signal.Signals(number).name
