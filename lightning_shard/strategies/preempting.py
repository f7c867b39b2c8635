"""A fit that is told to stop: all ranks save together at a step's end, and the job goes back into the queue."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard import _lightning
from lightning_shard.checkpoint import commit
from lightning_shard.cluster import slurm
from lightning_shard.cluster.preemption import (
    TIME_LIMIT,
    Agreement,
    Preempted,
    SignalFlag,
    TimeLimit,
    describe,
)
from lightning_shard.cluster.traces import dump_stacks
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.strategies import run_state
from lightning_shard.strategies.resuming import ResumingStrategy


class PreemptibleStrategy(ResumingStrategy):
    """Stops and saves a fit, and puts its job back into the queue; a subclass says when its set-up begins."""

    _flag: SignalFlag | None = None
    _limit: TimeLimit | None = None
    _agreement: Agreement | None = None
    _agreed = 0
    _last_look: float | None = None

    # Beginning and end

    def _take_over_signals(self) -> None:
        """Keep Lightning's handlers out; in a fit note the signals, elsewhere they end the process."""
        self._agreement = None
        if not self.preemption.signals:
            return
        _lightning.leave_signals_alone(self._replacements, self._trainer)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._flag = SignalFlag()
            self._flag.take_over(self.preemption.signals)

    def _give_signals_back(self) -> None:
        if self._flag is not None:
            self._flag.restore()
            self._flag = None

    def on_train_start(self) -> None:
        """Ask how much time the job has, and look after every batch whether to stop. All ranks call it."""
        super().on_train_start()
        self._agreed = self._looks = 0
        # Of the last looks: the first steps compile, and are no measure of those to come.
        self._gaps: deque[float] = deque([0.0], maxlen=50)
        self._last_look = None
        self._stoppable = False
        self._agreement = Agreement(Ranks.of().group)
        self._limit = self._read_limit() if self.is_global_zero else None
        _lightning.after_each_batch(self._replacements, self._trainer, self._after_batch)

    def on_train_end(self) -> None:
        """Leave no reduction running, and no checkpoint of a run that has ended."""
        super().on_train_end()
        if self._agreement is not None:
            self._agreement.finish()
            self._agreement = None
        path = self._own_path()
        if self.is_global_zero and path is not None and path.exists():
            commit.remove(path)

    def _read_limit(self) -> TimeLimit | None:
        job, before = self._job, self.preemption.seconds_before_limit
        if job is None or before is None or shutil.which("squeue") is None:
            return None
        limit = TimeLimit(lambda: slurm.time_left(job), before)
        if limit.seconds_left is not None:
            rank_zero_info(
                f"SLURM job {job.label} has {limit.seconds_left:.0f} s left; the run is saved a step, a save and "
                f"{limit.seconds_before:.0f} s before its end."
            )
        return limit

    # Looking whether to stop

    def _after_batch(self, fetcher: Any) -> None:
        """Between a training batch and the validation that may follow it. All ranks call it."""
        trainer = self._trainer
        validates = _lightning.validation_follows(trainer, fetcher)
        # In the middle of an accumulation the gradients so far would be lost.
        self._stoppable = not _lightning.should_accumulate(trainer)
        if self._stoppable and self._should_stop() and (validates or not _lightning.nothing_follows(trainer)):
            (_lightning.mark_before_validation if validates else _lightning.mark_after_batch)(trainer)
            self._save_and_leave()
        if validates:
            self._before = run_state.before_validation(trainer)

    def _in_validation(self) -> None:
        """Ahead of each batch of a validation inside a fit, which all ranks have equally many of."""
        if self._agreement is None or not self._stoppable or self._trainer.state.fn != TrainerFn.FITTING:
            return
        if self._should_stop():
            _lightning.mark_before_validation(self._trainer)
            self._rewound = self._before
            self._save_and_leave()

    def on_validation_start(self) -> None:
        """Count a validation that runs again from its beginning."""
        super().on_validation_start()
        if self._trainer.state.fn == TrainerFn.FITTING:
            _lightning.count_validation_anew(self._replacements, self._trainer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """See the parent's; the loops' state was loaded right before."""
        super().load_optimizer_state_dict(checkpoint)
        _lightning.settle_validation(self._replacements, self._trainer)

    def _should_stop(self) -> bool:
        assert self._agreement is not None
        now = time.monotonic()
        if self._last_look is not None:
            self._gaps.append(now - self._last_look)
        self._last_look = now
        self._looks += 1
        if not self._agreed and self._looks % self.preemption.every_n_steps == 0:
            own = 0 if self._flag is None else self._flag.received
            # Two looks: the one at which all ranks know is the one after.
            reserve = 2 * self.preemption.every_n_steps * max(self._gaps) + self.saver.reserve_seconds
            if not own and self._limit is not None and self._limit.is_near(reserve):
                own = TIME_LIMIT
            self._agreed = self._agreement(own)
        return bool(self._agreed)

    # Saving and leaving

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See the parent's; a step is not the longer for it."""
        super().save_checkpoint(*args, **kwargs)
        self._last_look = time.monotonic()

    def _saves_in_background(self) -> bool:
        return super()._saves_in_background() and not self._agreed

    def _save_and_leave(self) -> None:
        """Save, requeue and end the process. All ranks call it after the same step."""
        trainer = self._trainer
        reason = describe(self._agreed)
        _lightning.let_children_end(self)
        watchdog = threading.Timer(self.preemption.save_seconds, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        path = self._own_path()
        try:
            self.finish_saving()
        except CheckpointError as error:
            rank_zero_warn(f"A checkpoint could not be saved in the background: {error}")
        if path is None:
            rank_zero_warn(f"stopped by {reason}, but default_root_dir {trainer.default_root_dir} is not a local path.")
        else:
            trainer.save_checkpoint(path)
            rank_zero_info(f"stopped by {reason} after step {trainer.global_step}; saved {path}")
        for logger in trainer.loggers:
            logger.save()
        self.barrier("preempted")
        if self.is_global_zero:
            self._requeue()
        watchdog.cancel()
        raise Preempted(self.preemption.exit_code)

    def _requeue(self) -> None:
        if self._job is None or not self.preemption.requeue:
            return
        job = f"SLURM job {self._job.label}"
        # Said before: SLURM may end this process faster than the command returns.
        print(f"{job} goes back into the queue", file=sys.stderr, flush=True)
        if (refused := slurm.requeue(self._job)) is not None:
            print(f"{job} could not be requeued: {refused}", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        """In a thread of its own: the save hangs, most likely since a rank is lost."""
        print(f"[rank {self.global_rank}] the save took over {self.preemption.save_seconds:g} s", file=sys.stderr)
        dump_stacks()
        if self.is_global_zero:
            self._requeue()
        os._exit(self.preemption.exit_code)
