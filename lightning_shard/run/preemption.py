"""A fit that is told to stop: all ranks save together at a step's end, and the job goes back into the queue."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard.checkpoint.files import commit
from lightning_shard.checkpoint.files.place import Place
from lightning_shard.checkpoint.load import find_checkpoints
from lightning_shard.cluster import preemption, slurm
from lightning_shard.cluster.traces import dump_stacks
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.fit import Fit
from lightning_shard.run.identity import RunIdentity


class Preemption:
    """Notes signals and the time limit, and saves and ends the run once all ranks know of one."""

    def __init__(self, config: preemption.PreemptionConfig, checkpoints: Checkpoints) -> None:
        self._config, self._checkpoints = config, checkpoints
        self._identity = RunIdentity()
        self._flag: preemption.SignalFlag | None = None
        self._limit: preemption.TimeLimit | None = None
        self._agreement: preemption.Agreement | None = None
        self._agreed = 0
        self._looks = 0
        self._last_look: float | None = None
        # Of the last looks: the first steps compile, and are no measure of those to come.
        self._gaps: deque[float] = deque([0.0], maxlen=50)
        self._stoppable = False
        self._folders: list[Place] = []  # of this run's checkpoints, during the save before it stops
        self._killed_after: float | None = None
        self.before_validation: dict[str, Any] = {}
        """Parts of the run's state as they were then, to which a save in a validation goes back."""

    # Beginning and end

    @property
    def signals(self) -> tuple[str, ...]:
        return self._config.signals

    def take_over_signals(self) -> None:
        """Note the signals from here on."""
        self._agreement = None
        self._flag = preemption.SignalFlag()
        self._flag.take_over(self.signals)
        preemption.release_signals()

    def give_signals_back(self) -> None:
        """Put back the handlers that were there; may be called again."""
        if self._flag is not None:
            self._flag.restore()
            self._flag = None

    def start(self, identity: RunIdentity) -> None:
        """Begin to look after every batch whether to stop. All ranks call it when training starts."""
        self._identity = identity
        self._agreed = self._looks = 0
        self._gaps = deque([0.0], maxlen=50)
        self._last_look = None
        self._stoppable = False
        ranks = Ranks.of()
        self._agreement = preemption.Agreement(ranks.group)
        # It is asked how much time the job has.
        self._limit = self._read_limit() if ranks.is_first else None
        self._killed_after = preemption.torchrun_seconds(os.environ)

    def finish(self) -> None:
        """At the end of training: leave no reduction running, and no checkpoint of a run that has ended."""
        if self._agreement is not None:
            self._agreement.finish()
            self._agreement = None
        path = self._identity.own_path
        if Ranks.of().is_first and path.exists():
            commit.remove(path)

    def _read_limit(self) -> preemption.TimeLimit | None:
        job, before = self._identity.job, self._config.seconds_before_limit
        if job is None or before is None or shutil.which("squeue") is None:
            return None
        limit = preemption.TimeLimit(lambda: slurm.time_left(job), before)
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

    def after_batch(self, fit: Fit, fetcher: Any) -> None:
        """Between a training batch and the validation that may follow it. All ranks call it.

        ``fetcher`` is Lightning's, of the training batches. Preempted: the run was saved and ends.
        """
        validates = fit.validation_follows(fetcher)
        # In the middle of an accumulation the gradients so far would have to be saved too.
        self._stoppable = not fit.accumulates()
        if self._stoppable and self._should_stop() and (validates or not fit.nothing_follows()):
            (fit.go_on_before_validation if validates else fit.go_on_after_batch)()
            self._save_and_leave(fit)
        if validates:
            self.before_validation = fit.changed_by_validation()

    def in_validation(self, fit: Fit) -> None:
        """Ahead of each batch of a validation inside a fit, of which all ranks have equally many; raises Preempted."""
        if self._agreement is not None and self._stoppable and self._should_stop():
            self._save_and_leave(fit)

    def _should_stop(self) -> bool:
        assert self._agreement is not None
        now = time.monotonic()
        if self._last_look is not None:
            self._gaps.append(now - self._last_look)
        self._last_look = now
        self._looks += 1
        if not self._agreed and self._looks % self._config.every_n_steps == 0:
            own = 0 if self._flag is None else self._flag.received
            # Two looks: the one at which all ranks know is the one after.
            reserve = 2 * self._config.every_n_steps * max(self._gaps) + self._checkpoints.saver.reserve_seconds
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
            self._agreed = self._agreement(own)
        return bool(self._agreed)

    def saved(self) -> None:
        """A checkpoint was saved: a step is not the longer for it."""
        self._last_look = time.monotonic()

    # Saving and leaving

    def _save_and_leave(self, fit: Fit) -> None:
        """Save, requeue and end the process. All ranks call it after the same step."""
        reason = preemption.describe(self._agreed)
        fit.leave_processes()
        watchdog = threading.Timer(self._config.save_seconds, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        path = self._identity.own_path
        try:
            self._checkpoints.saver.finish()
        except CheckpointError as error:
            rank_zero_warn(f"A checkpoint could not be saved in the background: {error}")
        self._folders = [path.parent, *fit.checkpoint_folders()]
        try:
            fit.save(str(path))
        except BaseException:
            self._save_failed()
            raise
        self._folders = []
        rank_zero_info(f"stopped by {reason} after step {fit.step}; saved {path}")
        fit.save_loggers()
        ranks = Ranks.of()
        ranks.barrier()
        if ranks.is_first:
            self._requeue()
        watchdog.cancel()
        raise preemption.Preempted(self._config.exit_code)

    def _save_failed(self) -> None:
        """Where the save before a stop has failed: the job is requeued all the same, if it has a whole checkpoint."""
        folders, self._folders = self._folders, []
        # Rank 1 does too: it may be rank 0 that has died.
        if folders and Ranks.of().rank < 2 and find_checkpoints(folders, self._identity.name).own:
            self._requeue()

    def end_process(self, code: int) -> None:
        """End this process where it stands, wherever that is."""
        with contextlib.suppress(Exception):
            self._save_failed()
        os._exit(code)

    def _requeue(self) -> None:
        if self._identity.job is None or self._config.requeue == "never":
            return
        job = f"SLURM job {self._identity.job.label}"
        if self._config.requeue == "auto" and slurm.is_cancelled(self._identity.job):
            print(f"{job} is being ended by SLURM, and is not put back into the queue", file=sys.stderr, flush=True)
            return
        # Said before: SLURM may end this process faster than the command returns.
        print(f"{job} goes back into the queue", file=sys.stderr, flush=True)
        if (refused := slurm.requeue(self._identity.job)) is not None:
            print(f"{job} could not be requeued: {refused}", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        """In a thread of its own: the save hangs, most likely since a rank is lost."""
        ranks = Ranks.of()
        print(f"[rank {ranks.rank}] the save took over {self._config.save_seconds:g} s", file=sys.stderr)
        dump_stacks()
        if ranks.is_first:
            self._requeue()
        os._exit(self._config.exit_code)
