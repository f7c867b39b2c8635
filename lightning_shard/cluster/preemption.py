"""Being told to stop: signals that only set a flag, a time limit, and the ranks' agreement upon both."""

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
from lightning_shard.cluster.slurm import read_job
from lightning_shard.errors import ConfigurationError

NAMELESS = "local"  # The run's name where no launcher gave it one.
TIME_LIMIT = 255  # What `Agreement` carries in place of a signal's number when the time is nearly up.


@checked_fields("preemption")
@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """What a fit does when it is told to stop: all ranks save together after the step, and the job is requeued."""

    signals: tuple[str, ...] = ("SIGUSR1", "SIGTERM")
    """Signals that mean it. None of them ends the process by itself any more while a fit runs; an empty list leaves
    the Trainer's own handlers in place."""

    requeue: Literal["auto", "always", "never"] = "auto"
    """In a SLURM batch job: put it back into the queue (``scontrol requeue``) once the checkpoint is whole. "auto" does
    so unless the job is being cancelled (``scancel``)."""

    exit_code: int = 75
    """How the processes end after the save: not 0, so that what follows in a batch script can tell (75 is
    EX_TEMPFAIL), and that torchrun starts them again."""

    seconds_before_limit: float | None = 90.0
    """In a SLURM job: save this long, and the longest step and save seen so far, before its time limit; at most half
    of the time that it had at the start. null: wait for a signal."""

    save_seconds: float = 600.0
    """How long the save may take. After it every process writes its stacks to stderr, and the job is requeued with
    the checkpoint that is there."""

    run: str | None = None
    """Name of the run, that checkpoints are found by again (``ckpt_path: auto``). Default: the SLURM job, with its
    array task and its step, or torchrun's ``--rdzv-id``. Give one to resume under another job id; the array task is
    added to it."""

    keep_batch: bool = False
    """Where the run goes on with another number of ranks, change ``accumulate_grad_batches`` so that a step keeps its
    micro-batches, of all ranks together, if they divide by the ranks. Otherwise it is said that the step is another."""

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
                f"preemption.exit_code is {self.exit_code}, but must be from 1 to 255: with 0 the batch script would "
                "go on as if the training had ended."
            )
        if self.run is not None and (not self.run or set(self.run) & set("/\0") or self.run.startswith(".")):
            raise ConfigurationError(
                f"preemption.run is {self.run!r}, but must be a name that a folder can have, without '/' and not "
                "beginning with '.'."
            )


class Preempted(SystemExit):
    """Ends a process after the save; it carries the exit code and is no failure of the training."""


def run_name(config: PreemptionConfig, environ: Mapping[str, str]) -> str:
    """What tells this run's checkpoints from others', the same after a requeue."""
    job = read_job(environ)
    if config.run is not None:
        return config.run if job is None or job.array_task is None else f"{config.run}_{job.array_task}"
    if job is not None:
        return f"slurm-{job.label}-{'batch' if job.step is None else job.step}"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    return NAMELESS if elastic == "none" else f"torchrun-{elastic.replace('/', '_')}"


class SignalFlag:
    """Handlers that note a signal and do nothing else, since a handler runs between any two lines of Python."""

    def __init__(self) -> None:
        self.received = 0  # The number of the last signal, 0 before the first.
        self._before: dict[int, Any] = {}

    def take_over(self, names: tuple[str, ...]) -> bool:
        """Install the handlers, nothing received yet; False in a thread in which Python has none."""
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return False
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)
        return True

    def restore(self) -> None:
        """Put back what was there before; may be called again."""
        while self._before:
            number, handler = self._before.popitem()
            # None: a handler in C, such as faulthandler's, which Python can't put back; noting goes on then.
            if handler is not None and signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number


def release_signals() -> None:
    """Let those come that ``lightning-shard`` held back (`__main__`) until somebody handles them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGUSR2])


class TimeLimit:
    """When to stop so that a save still fits into the time that the job has left. One rank asks it."""

    def __init__(self, seconds_left: Callable[[], float | None], seconds_before: float) -> None:
        """Ask once how much time is left; ``seconds_left`` gives None for no limit."""
        self._ask = seconds_left
        left = seconds_left()
        self.seconds_left = left
        self._end = None if left is None else time.monotonic() + left
        self.seconds_before = seconds_before if left is None else min(seconds_before, left / 2)

    def is_near(self, reserve: float = 0.0) -> bool:
        """Whether to stop now; ``reserve``: seconds that a step and a save take. Asks again then: limits are moved."""
        if self._end is None or time.monotonic() + self.seconds_before + reserve < self._end:
            return False
        left = self._ask()
        if left is not None:
            self._end = time.monotonic() + left
        return time.monotonic() + self.seconds_before + reserve >= self._end


class Agreement:
    """All ranks learn, at the same step, that one was told to stop: a number is reduced beside the step, on the CPU,
    and what a rank says in one call is known to all in the next.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group``: one with a CPU backend, over all ranks; None: this process is alone."""
        self._group = group
        self._number = torch.zeros((), dtype=torch.int32)
        self._work: Any = None

    def __call__(self, number: int) -> int:
        """Say ``number`` (0: nothing) and get the largest that was said in the call before. All ranks call it."""
        if self._group is None:
            return number
        agreed = self.finish()
        self._number = torch.tensor(number, dtype=torch.int32)
        self._work = dist.all_reduce(self._number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> int:
        """The outcome of the last call, with no reduction left running. All ranks call it."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._number)


def describe(number: int) -> str:
    return "the time limit" if number == TIME_LIMIT else signal.Signals(number).name
