"""Which checkpoint a run goes on from: its own, never another job's."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard import _lightning
from lightning_shard.checkpoint.load import verify_files
from lightning_shard.checkpoint.newest import Found, find_checkpoints
from lightning_shard.cluster.preemption import PreemptionConfig, run_name
from lightning_shard.cluster.slurm import SlurmJob, read_job
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from lightning_shard.ranks import Ranks
from lightning_shard.strategies.ledgering import LedgerStrategy

AUTO = "auto"
"""The ``ckpt_path`` that means: the newest whole checkpoint of this run, if there is one."""

FOLDER = "preempted"
"""In the Trainer's ``default_root_dir``: where a stopped run saves, one checkpoint for each run."""

FAILURES = "failures"
"""In the Trainer's ``default_root_dir``: traces of ranks that ended while they were stuck, a folder for each run."""

NAMELESS = "local"
"""The run's name where no launcher gave it one."""


class ResumingStrategy(LedgerStrategy):
    """Names the run in its checkpoints and finds them again by that name."""

    preemption: PreemptionConfig

    _run_name: str = NAMELESS
    _job: SlurmJob | None = None

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _identify_run(self, environ: Mapping[str, str]) -> None:
        """Find out which run this is, and take over the choice of what it resumes from. All ranks call it."""
        self._job = read_job(environ)
        self._run_name = run_name(self.preemption, environ)
        _lightning.choose_checkpoint(self._replacements, self._trainer, self._choose_checkpoint)

    def _run_facts(self) -> dict[str, Any]:
        return {"name": self._run_name, "step": self._trainer.global_step, "time": time.time()}

    def _local_folder(self, name: str) -> Path | None:
        """A folder in the Trainer's, which may not exist; None where the Trainer's is not a local path."""
        root = str(self._trainer.default_root_dir)
        return None if re.match(r"\w+://", root) else Path(root) / name

    def _own_path(self) -> Path | None:
        """Where this run saves when it is stopped; None where the Trainer's folder is not a local path."""
        folder = self._local_folder(FOLDER)
        return None if folder is None else folder / f"{self._run_name}.ckpt"

    def _failure_folder(self) -> Path | None:
        """Where ranks that are stuck in a collective write what they can; None as for `_own_path`."""
        folder = self._local_folder(FAILURES)
        return None if folder is None else folder / self._run_name

    def _choose_checkpoint(self, asked: Any) -> Any:
        """The checkpoint to resume from where ``ckpt_path`` is ``asked``. All ranks call it.

        ``auto``: this run's newest whole one. None, in a fit: what this run left when it was stopped, if it was.

        Raises:
            CheckpointNotFoundError: ``auto`` outside a fit, with nothing to find.
            CheckpointError: a checkpoint of another job that Lightning found by itself.
        """
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        own = self._own_path()
        folders = [] if own is None else [own.parent]
        if asked is None:
            return self._newest(folders, speak=False) if fitting and self._run_name != NAMELESS else None
        if asked != AUTO:
            self._refuse_stock_checkpoint(Path(asked))
            return asked
        folders += checkpoint_folders(self._trainer)
        found = self._newest(folders, speak=fitting)
        if found is None and not fitting:
            raise CheckpointNotFoundError(
                f"ckpt_path is auto, but there is no whole checkpoint of run {self._run_name} in "
                f"{', '.join(map(str, folders))}: give the path of one."
            )
        return found

    def _newest(self, folders: list[Path], *, speak: bool) -> str | None:
        """The newest checkpoint of this run whose files all have their checksums. All ranks call it."""
        found: Found = Ranks.of().first("looking for checkpoints", lambda: find_checkpoints(folders, self._run_name))
        for reason in found.broken:
            rank_zero_warn(f"Passed over a broken checkpoint of run {self._run_name}: {reason}")
        for path, step in found.own:
            try:
                verify_files(path)
            except CheckpointCorruptError as error:
                rank_zero_warn(f"Passed over a broken checkpoint of run {self._run_name}: {error}")
                continue
            rank_zero_info(f"Run {self._run_name} goes on from step {step}: {path}")
            return path
        if speak:
            others = f" (there are some of {', '.join(found.others)})" if found.others else ""
            say = rank_zero_warn if self._job is not None and self._job.restarts else rank_zero_info
            say(f"No whole checkpoint of run {self._run_name}{others}: it starts from the beginning.")
        return None

    def _refuse_stock_checkpoint(self, path: Path) -> None:
        root = Path(str(self._trainer.default_root_dir))
        if not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", path.name) or path.parent.resolve() != root.resolve():
            return
        raise CheckpointError(
            f"Lightning chose {path} by itself, since it lies in default_root_dir. It does not say which job wrote it, "
            "and may be another's: move it away, give another default_root_dir, or set ckpt_path: auto to go on from "
            "this run's own checkpoints."
        )


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Where the Trainer's ``ModelCheckpoint``s save, in every version of the logger's folder; local paths alone."""
    folders: list[Path] = []
    for callback in trainer.checkpoint_callbacks:
        directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if not directory or re.match(r"\w+://", str(directory)):
            continue
        folder = Path(directory)
        folders.append(folder)
        if trainer.loggers and folder.name == "checkpoints":
            # Without a fixed version a logger makes a new one each time that the run is started.
            folders += sorted(folder.parent.parent.glob("*/checkpoints"))
    return folders
