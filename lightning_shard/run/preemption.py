"""Which run this is, what it goes on from, and a fit that is told to stop. Its name, its job and its folders say which
checkpoint it goes on from, never another job's. To stop, all ranks save together at a step's end, and the job goes back
into the queue.
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
from lightning_shard.cluster.preemption import NAMELESS, PreemptionConfig, run_name
from lightning_shard.cluster.slurm_job import SlurmJob, read_job
from lightning_shard.cluster.traces import dump_stacks
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.data import changed_by_validation

AUTO = "auto"  # The ``ckpt_path`` that means: the newest intact checkpoint of this run, if there is one.
FOLDER = "preempted"  # In the Trainer's ``default_root_dir``: where a stopped run saves, one checkpoint for each run.
FAILURES = "failures"
"""In the Trainer's ``default_root_dir``: traces of ranks that ended while they were stuck, a folder for each run."""


def checkpoint_folders(trainer: Trainer) -> list[Location]:
    """Where the Trainer's ``ModelCheckpoint``s save, in every version of the logger's folder."""
    folders: list[Location] = []
    for callback in trainer.checkpoint_callbacks:
        directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if not directory:
            continue
        folder = location(directory)
        folders.append(folder)
        if trainer.loggers and folder.name == "checkpoints":
            # Without a fixed version a logger makes a new one each time that the run is started.
            versions = [version / folder.name for version in checkpoint_names(folder.parent.parent)]
            folders += [each for each in versions if each.is_dir()]
    return folders


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The name under which a run saves its checkpoints and finds them again."""

    name: str = NAMELESS
    job: SlurmJob | None = None
    root: str = "."  # The Trainer's ``default_root_dir``.

    @staticmethod
    def read(config: PreemptionConfig, environ: Mapping[str, str], root: str) -> "RunIdentity":
        return RunIdentity(name=run_name(config, environ), job=read_job(environ), root=root)

    def facts(self, step: int, micro_batches: int = 1) -> dict[str, Any]:
        """What the manifest says of the run; ``micro_batches``: of a step, on all ranks together."""
        return {"name": self.name, "step": step, "time": time.time(), "micro_batches": micro_batches}

    def micro_batches(self, folders: list[Location]) -> int | None:
        """Of a step of this run's newest checkpoint, on all ranks; None: there is none that says it. One rank calls."""
        found = [] if self.name == NAMELESS else find_checkpoints([self.own_path.parent, *folders], self.name).own
        return found[0][1].get("micro_batches") if found else None

    @property
    def own_path(self) -> Location:
        """Where this run saves when it is stopped."""
        return location(self.root) / FOLDER / f"{self.name}.ckpt"

    @property
    def failure_folder(self) -> Path | None:
        """Where ranks that are stuck in a collective write what they can; None in a store."""
        folder = location(self.root)
        return None if isinstance(folder, StorePath) else folder / FAILURES / self.name

    def choose_checkpoint(self, asked: Any, *, fitting: bool, folders: list[Location]) -> Any:
        """The checkpoint to resume from where ``ckpt_path`` is ``asked``, from ``folders`` of callbacks. All ranks call
        it.

        ``auto``: this run's newest intact one, opened. None, if ``fitting``: what this run left when it was stopped, if
        it was. Anything else is returned as it is, but in a fit of a requeued job, which goes on from its own newest
        one. ConfigurationError: ``auto`` in a run without a name. CheckpointNotFoundError: ``auto`` outside a fit, with
        nothing to find. CheckpointError: a checkpoint of another job that Lightning found by itself.
        """
        own: list[Location] = [self.own_path.parent]
        if asked is None:
            return self._newest(own, speak=False) if fitting and self.name != NAMELESS else None
        if asked != AUTO:
            self._refuse_stock_checkpoint(Path(asked))
            again = fitting and self.job is not None and self.job.restarts > 0
            return (self._newest(own + folders, speak=False) if again else None) or asked
        if self.name == NAMELESS:
            raise ConfigurationError(
                "ckpt_path is auto, but this run has no name, by which its checkpoints are told from those of other "
                "runs in these folders: set preemption: {run: NAME} of the strategy, or give a checkpoint's path."
            )
        looked_in = own + folders
        found = self._newest(looked_in, speak=fitting)
        if found is None and not fitting:
            raise CheckpointNotFoundError(
                f"ckpt_path is auto, but there is no whole checkpoint of run {self.name} in "
                f"{', '.join(map(str, looked_in))}: give the path of one."
            )
        return found

    def _newest(self, folders: list[Location], *, speak: bool) -> OpenCheckpoint | None:
        """The newest checkpoint of this run whose files all have their checksums. All ranks call it."""
        found = open_newest(folders, self.name)
        for reason in found.broken:
            rank_zero_warn(f"Run {self.name} passes over a broken checkpoint: {reason}")
        if (checkpoint := found.newest) is not None:
            step = checkpoint.manifest.facts.run["step"]
            rank_zero_info(f"Run {self.name} goes on from step {step}: {checkpoint.path}")
            return checkpoint
        if speak:
            say = rank_zero_warn if self.job is not None and self.job.restarts else rank_zero_info
            say(f"No whole checkpoint of run {self.name}: it starts from the beginning.")
        return None

    def _refuse_stock_checkpoint(self, path: Path) -> None:
        if not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", path.name) or path.parent.resolve() != Path(self.root).resolve():
            return
        raise CheckpointError(
            f"Lightning chose {path} by itself, since it lies in default_root_dir. It does not say which job wrote it, "
            "and may be another's: move it away, give another default_root_dir, or set ckpt_path: auto to go on from "
            "this run's own checkpoints."
        )


class Preemption:
    """Notes signals and the time limit, and saves and ends the run once all ranks know of one."""

    def __init__(self, config: preemption.PreemptionConfig, checkpoints: Checkpoints) -> None:
        self._config, self._checkpoints, self.signals = config, checkpoints, config.signals
        self._identity = RunIdentity()
        self._flag = preemption.SignalFlag()
        self.give_signals_back = self._flag.restore_handlers
        self._limit: preemption.TimeLimit | None = None
        self._stop_number: preemption.DelayedMax | None = None
        self._agreed, self._stoppable = 0, False
        self._folders: list[Location] = []  # of this run's checkpoints, during the save before it stops
        self._killed_after: float | None = None
        self.before_validation: dict[str, Any] = {}
        """Parts of the run's state as they were then, to which a save in a validation goes back."""

    # Beginning and end

    def take_over_signals(self) -> None:
        self._stop_number = None
        self._flag.install_handlers(self.signals)
        preemption.release_signals()

    def start(self, identity: RunIdentity) -> None:
        """Begin to look after every batch whether to stop. All ranks call it when training starts."""
        self._identity = identity
        self._agreed = self._looks = 0
        # Of the last looks: the first steps compile, and are no measure of those to come.
        self._gaps: deque[float] = deque([0.0], maxlen=50)
        self._last_look: float | None = None
        self._stoppable = False
        ranks = Ranks.of()
        self._stop_number = preemption.DelayedMax(ranks.group)
        # It is asked how much time the job has.
        self._limit = self._read_limit() if ranks.is_first else None
        # How long torchrun leaves its processes after SIGTERM (torch/distributed/launcher/api.py).
        seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        self._killed_after = seconds if "TORCHELASTIC_RUN_ID" in os.environ else None

    def finish(self) -> None:
        """At the end of training: leave no reduction running, and no checkpoint of a run that has ended."""
        if self._stop_number is not None:
            self._stop_number.wait_for_largest()
            self._stop_number = None
        path = self._identity.own_path
        if Ranks.of().is_first and path.exists():
            commit.remove_checkpoint(path)

    def _read_limit(self) -> preemption.TimeLimit | None:
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

    # Looking whether to stop

    @property
    def is_stopping(self) -> bool:
        return bool(self._agreed)

    def after_batch(self, trainer: Trainer) -> None:
        """Between a training batch and a validation. All ranks call it. Preempted: the run was saved and ends."""
        validates = loops.validation_follows(trainer)
        # In the middle of an accumulation the gradients so far would have to be saved too.
        self._stoppable = not loops.should_accumulate(trainer)
        if self._stoppable and self._should_stop() and (validates or not loops.nothing_follows(trainer)):
            loops.mark_after_batch(trainer)
            self._save_and_leave(trainer)
        if validates:
            self.validation_follows(trainer)

    def validation_follows(self, trainer: Trainer) -> None:
        """Keep what a validation may change, ahead of the first thing that it does."""
        self.before_validation = changed_by_validation(trainer)

    def in_validation(self, trainer: Trainer) -> None:
        """Ahead of each batch of a validation inside a fit, of which all ranks have equally many; raises Preempted."""
        if self._stop_number is not None and self._stoppable and self._should_stop():
            self._save_and_leave(trainer)

    def _should_stop(self) -> bool:
        assert self._stop_number is not None
        now = time.monotonic()
        if self._last_look is not None:
            self._gaps.append(now - self._last_look)
        self._last_look = now
        self._looks += 1
        if not self._agreed:
            own = self._flag.received
            # Two looks: the one at which all ranks know is the one after.
            reserve = 2 * max(self._gaps) + self._checkpoints.saver.reserve_seconds
            # By then the first steps, which compile, are no longer among those that count.
            if self._killed_after is not None and reserve > self._killed_after and self._looks > 50:
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

    def saved(self) -> None:
        """A checkpoint was saved: a step is not the longer for it."""
        self._last_look = time.monotonic()

    # Saving and leaving

    def _save_and_leave(self, trainer: Trainer) -> None:
        """Save, requeue and end the process. All ranks call it after the same step."""
        processes.take_children(trainer)  # which may end with their exit code
        watchdog = threading.Timer(self._config.save_seconds, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._save(trainer)
        finally:
            watchdog.cancel()  # after an error too, which whoever called fit may go on from
        raise preemption.Preempted(self._config.exit_code)

    def _save(self, trainer: Trainer) -> None:
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
        """Where the save before a stop has failed: the job is requeued all the same, if it has a whole checkpoint."""
        folders, self._folders = self._folders, []
        # Rank 1 does too: it may be rank 0 that has died.
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
        job = f"SLURM job {self._identity.job.label}"
        if self._config.requeue == "auto" and slurm_job.is_cancelled(self._identity.job):
            print(f"{job} is being ended by SLURM, and is not put back into the queue", file=sys.stderr, flush=True)
            return
        # Said before: SLURM may end this process faster than the command returns.
        print(f"{job} goes back into the queue", file=sys.stderr, flush=True)
        if (refused := slurm_job.requeue(self._identity.job)) is not None:
            print(f"{job} could not be requeued: {refused}", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        """In a thread of its own: the save hangs, most likely since a rank is lost."""
        ranks = Ranks.of()
        print(f"[rank {ranks.rank}] the save took over {self._config.save_seconds:g} s", file=sys.stderr)
        dump_stacks()
        if ranks.is_first:
            self._requeue()
        self.end_process(self._config.exit_code, requeued=True)
