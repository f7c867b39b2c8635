"""Identity of a run, the checkpoint that it resumes from, and a fit that is told to stop.

The run's name, its job and its folders select the checkpoint, never another job's. To stop, all ranks save together at
a step's end, and the job is requeued.
"""

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard._lightning import loops, processes
from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.layout import checkpoint_names
from lightning_shard.checkpoint.files.location import Location, StorePath, location
from lightning_shard.checkpoint.load import OpenCheckpoint, find_checkpoints, open_newest
from lightning_shard.cluster import preemption, slurm_job
from lightning_shard.cluster.preemption import NAMELESS, Preempted, PreemptionConfig, run_name
from lightning_shard.cluster.slurm_job import SlurmJob, read_job
from lightning_shard.cluster.traces import dump_stacks
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.data import changed_by_validation

STOPPED_FOLDER = "preempted"  # Below ``default_root_dir``: one checkpoint for each run that was stopped.
FAILURES = "failures"  # Below ``default_root_dir``: traces of ranks that ended while they were stuck, by run.


def checkpoint_folders(trainer: Trainer) -> list[Location]:
    """Folders of the Trainer's ``ModelCheckpoint``s, in every version of the logger's folder."""
    folders: list[Location] = []
    for callback in trainer.checkpoint_callbacks:
        directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if not directory:
            continue
        folder = location(directory)
        folders.append(folder)
        if trainer.loggers and folder.name == "checkpoints":
            # Without a fixed version a logger makes a new folder at each start of the run.
            versions = [version / folder.name for version in checkpoint_names(folder.parent.parent)]
            folders += [each for each in versions if each.is_dir()]
    return folders


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Name of a run, under which its checkpoints are saved and found."""

    name: str = NAMELESS
    job: SlurmJob | None = None
    root: str = "."  # The Trainer's ``default_root_dir``.

    @staticmethod
    def read(config: PreemptionConfig, environ: Mapping[str, str], root: str) -> "RunIdentity":
        return RunIdentity(name=run_name(config, environ), job=read_job(environ), root=root)

    def facts(self, step: int, micro_batches: int = 1) -> dict[str, Any]:
        """Facts for the manifest. ``micro_batches``: of a step, on all ranks together."""
        return {"name": self.name, "step": step, "time": time.time(), "micro_batches": micro_batches}

    def micro_batches(self, folders: list[Location]) -> int | None:
        """Micro-batches of a step in this run's newest checkpoint, on all ranks. None: unknown. One rank calls it."""
        found = [] if self.name == NAMELESS else find_checkpoints([self.own_path.parent, *folders], self.name).own
        return found[0][1].get("micro_batches") if found else None

    @property
    def own_path(self) -> Location:
        """Path of the checkpoint that a stopped run saves."""
        return location(self.root) / STOPPED_FOLDER / f"{self.name}.ckpt"

    @property
    def failure_folder(self) -> Path | None:
        """Folder for traces of ranks that are stuck in a collective. None in an object store."""
        folder = location(self.root)
        return None if isinstance(folder, StorePath) else folder / FAILURES / self.name

    def choose_checkpoint(self, asked: Any, *, fitting: bool, folders: list[Location]) -> Any:
        """Choose the checkpoint to resume from. ``asked``: the ``ckpt_path``. ``folders``: of callbacks. All ranks call
        it.

        ``auto``: this run's newest intact one, opened. None, if ``fitting``: the one that this run saved when it was
        stopped, if any. Other values are returned, except in a fit of a requeued job, which resumes from its own newest
        one. ConfigurationError: ``auto`` in a run without a name. CheckpointNotFoundError: ``auto`` outside of a fit,
        with nothing to find. CheckpointError: a checkpoint of another job that Lightning found by itself.
        """
        own: list[Location] = [self.own_path.parent]
        if asked is None:
            return self._newest(own, speak=False) if fitting and self.name != NAMELESS else None
        if asked != "auto":
            path = Path(asked)
            if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", path.name) and path.parent.resolve() == Path(self.root).resolve():
                raise CheckpointError(
                    f"Lightning chose {path} by itself, since it lies in default_root_dir. It does not say which job "
                    "wrote it: move it away, or set ckpt_path: auto to go on from this run's own checkpoints."
                )
            again = fitting and self.job is not None and self.job.restarts > 0
            return (self._newest(own + folders, speak=False) if again else None) or asked
        if self.name == NAMELESS:
            raise ConfigurationError(
                "ckpt_path is auto, but this run has no name, which tells its checkpoints from other runs' in these "
                "folders: set preemption: {run: NAME} of the strategy, or give a checkpoint's path."
            )
        found = self._newest(own + folders, speak=fitting)
        if found is None and not fitting:
            raise CheckpointNotFoundError(
                f"ckpt_path is auto, but there is no whole checkpoint of run {self.name} in "
                f"{', '.join(map(str, own + folders))}: give the path of one."
            )
        return found

    def _newest(self, folders: list[Location], *, speak: bool) -> OpenCheckpoint | None:
        """Newest checkpoint of this run with valid checksums. All ranks call it."""
        found = open_newest(folders, self.name)
        for reason in found.broken:
            rank_zero_warn(f"Run {self.name} passes over a broken checkpoint: {reason}")
        if (checkpoint := found.newest) is not None:
            step = checkpoint.manifest.facts.run["step"]
            rank_zero_info(f"Run {self.name} goes on from step {step}: {checkpoint.path}")
        elif speak:
            say = rank_zero_warn if self.job is not None and self.job.restarts else rank_zero_info
            say(f"No whole checkpoint of run {self.name}: it starts from the beginning.")
        return checkpoint


class Preemption:
    """Notes signals and the time limit. Once all ranks know of one, the run is saved and ends."""

    def __init__(self, config: PreemptionConfig, checkpoints: Checkpoints) -> None:
        self._config, self._checkpoints, self.signals = config, checkpoints, config.signals
        self._identity = RunIdentity()
        self._flag = preemption.SignalFlag()
        self.give_signals_back = self._flag.restore_handlers
        self._limit: preemption.TimeLimit | None = None
        self._stop_number: preemption.DelayedMax | None = None
        self._agreed, self._stoppable = 0, False
        self._folders: list[Location] = []  # of this run's checkpoints, during the last save
        self._killed_after: float | None = None
        self.before_validation: dict[str, Any] = {}
        """State of the run before the last validation. A save during a validation keeps this one."""

    # Beginning and end

    def take_over_signals(self) -> None:
        self._stop_number = None
        self._flag.install_handlers(self.signals)
        preemption.release_signals()

    def start_checks(self, identity: RunIdentity) -> None:
        """Check after every batch from now on. All ranks call it when training starts."""
        self._identity = identity
        self._agreed = self._checks = 0
        # Seconds between the last checks. The first steps compile, and say nothing of later ones.
        self._gaps: deque[float] = deque([0.0], maxlen=50)
        self._last_check: float | None = None
        self._stoppable = False
        ranks = Ranks.of()
        self._stop_number = preemption.DelayedMax(ranks.group)
        # Only rank 0 asks for the job's remaining time.
        self._limit = self._read_time_limit() if ranks.is_first else None
        # Seconds from SIGTERM until torchrun kills its processes (torch/distributed/launcher/api.py).
        seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        self._killed_after = seconds if "TORCHELASTIC_RUN_ID" in os.environ else None

    def end_checks(self) -> None:
        """At the end of training: end the pending reduction, and remove the checkpoint of a stopped run."""
        if self._stop_number is not None:
            self._stop_number.wait_for_largest()
            self._stop_number = None
        path = self._identity.own_path
        if Ranks.of().is_first and path.exists():
            commit.remove_checkpoint(path)

    def _read_time_limit(self) -> preemption.TimeLimit | None:
        job, before = self._identity.job, self._config.seconds_before_limit
        if job is None or before is None or shutil.which("squeue") is None:
            return None
        limit = preemption.TimeLimit(lambda: slurm_job.time_left(job), before)
        if limit.seconds_left is not None:
            rank_zero_info(
                f"SLURM job {job.label} has {limit.seconds_left:.0f} s left; the run is saved a step, a save and "
                f"{limit.seconds_before:.0f} s before its end."
            )
        return limit

    # Check whether to stop

    @property
    def is_stopping(self) -> bool:
        return bool(self._agreed)

    def stop_after_batch(self, trainer: Trainer) -> None:
        """Save and end the run after a training batch, if all ranks know of a reason (Preempted). All ranks call it."""
        validates = loops.validation_follows(trainer)
        # Within an accumulation the gradients would have to be saved too.
        self._stoppable = not loops.should_accumulate(trainer)
        if self._stoppable and self._should_stop() and (validates or not loops.nothing_follows(trainer)):
            loops.mark_after_batch(trainer)
            self._save_and_leave(trainer)
        if validates:
            self.note_validation(trainer)

    def note_validation(self, trainer: Trainer) -> None:
        """Keep the state that a validation may change, before it begins."""
        self.before_validation = changed_by_validation(trainer)

    def stop_in_validation(self, trainer: Trainer) -> None:
        """Save and end the run before a batch of a validation in a fit (Preempted). All ranks call it."""
        if self._stop_number is not None and self._stoppable and self._should_stop():
            self._save_and_leave(trainer)

    def _should_stop(self) -> bool:
        assert self._stop_number is not None
        now = time.monotonic()
        if self._last_check is not None:
            self._gaps.append(now - self._last_check)
        self._last_check = now
        self._checks += 1
        if not self._agreed:
            own = self._flag.received
            # Time of two checks: all ranks learn of a stop one check after the rank that notes it.
            reserve = 2 * max(self._gaps) + self._checkpoints.saver.reserve_seconds
            # After 50 checks the first steps, which compile, do not count any more.
            if self._killed_after is not None and reserve > self._killed_after and self._checks > 50:
                rank_zero_warn(
                    f"torchrun kills processes {self._killed_after:g} s after SIGTERM, but two steps and a save take "
                    f"{reserve:.0f} s here, so that nothing would be saved: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to "
                    f"{2 * reserve:.0f} in its environment."
                )
                self._killed_after = None
            if not own and self._limit is not None and self._limit.is_near(reserve):
                own = preemption.TIME_LIMIT
            self._agreed = self._stop_number(own)
        return bool(self._agreed)

    def note_save(self) -> None:
        """Leave a save out of the time of a step."""
        self._last_check = time.monotonic()

    # Save and leave

    def _save_and_leave(self, trainer: Trainer) -> None:
        """Save, requeue and end the process. All ranks call it after the same step."""
        processes.take_children(trainer)  # children may end with their exit code
        watchdog = threading.Timer(self._config.save_seconds, self._abandon_save)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._save_and_requeue(trainer)
        finally:
            watchdog.cancel()  # after an error too: the caller of fit may handle it
        raise Preempted(self._config.exit_code)

    def _save_and_requeue(self, trainer: Trainer) -> None:
        path, reason = self._identity.own_path, preemption.describe_reason(self._agreed)
        try:
            self._checkpoints.saver.finish_background_save()
        except CheckpointError as error:
            rank_zero_warn(f"A checkpoint could not be saved in the background: {error}")
        self._folders = [path.parent, *checkpoint_folders(trainer)]
        try:
            trainer.save_checkpoint(str(path))
        except BaseException:
            self._save_failed()
            raise
        self._folders = []
        rank_zero_info(f"stopped by {reason} after step {trainer.global_step}; saved {path}")
        for logger in trainer.loggers:
            logger.save()
        ranks = Ranks.of()
        ranks.barrier()
        if ranks.is_first:
            self._requeue()

    def _save_failed(self) -> None:
        """Requeue the job after a failed save, if it has a whole checkpoint."""
        folders, self._folders = self._folders, []
        # Rank 1 does too, because rank 0 may have died.
        if folders and Ranks.of().rank < 2 and find_checkpoints(folders, self._identity.name).own:
            self._requeue()

    def end_process(self, code: int, *, requeued: bool = False) -> None:
        with contextlib.suppress(Exception):
            if not requeued:
                self._save_failed()
        os._exit(code)

    def _requeue(self) -> None:
        if self._identity.job is None or self._config.requeue == "never":
            return
        job, say = self._identity.job, partial(print, file=sys.stderr, flush=True)
        if self._config.requeue == "auto" and slurm_job.is_cancelled(job):
            say(f"SLURM job {job.label} is being ended by SLURM, and is not put back into the queue")
            return
        # Printed first: SLURM may end this process before the command returns.
        say(f"SLURM job {job.label} goes back into the queue")
        if (refused := slurm_job.requeue(job)) is not None:
            say(f"SLURM job {job.label} could not be requeued: {refused}")

    def _abandon_save(self) -> None:
        """End the process because the save hangs, probably on a lost rank. It runs in its own thread."""
        ranks = Ranks.of()
        print(f"[rank {ranks.rank}] the save took over {self._config.save_seconds:g} s", file=sys.stderr)
        dump_stacks()
        if ranks.is_first:
            self._requeue()
        self.end_process(self._config.exit_code, requeued=True)
