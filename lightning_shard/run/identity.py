"""Which run this is: its name, its job and its folders, and which checkpoint it goes on from: never another job's."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard.checkpoint.files.place import Place, StorePath, place
from lightning_shard.checkpoint.load import OpenCheckpoint, find_checkpoints, open_newest
from lightning_shard.cluster.preemption import PreemptionConfig, run_name
from lightning_shard.cluster.slurm import SlurmJob, read_job
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError

AUTO = "auto"  # The ``ckpt_path`` that means: the newest intact checkpoint of this run, if there is one.
FOLDER = "preempted"  # In the Trainer's ``default_root_dir``: where a stopped run saves, one checkpoint for each run.
FAILURES = "failures"
"""In the Trainer's ``default_root_dir``: traces of ranks that ended while they were stuck, a folder for each run."""

NAMELESS = "local"  # The run's name where no launcher gave it one.


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The name under which a run saves its checkpoints and finds them again."""

    name: str = NAMELESS
    job: SlurmJob | None = None
    root: str = "."  # The Trainer's ``default_root_dir``.

    @staticmethod
    def read(config: PreemptionConfig, environ: Mapping[str, str], root: str) -> RunIdentity:
        return RunIdentity(name=run_name(config, environ), job=read_job(environ), root=root)

    def facts(self, step: int, micro_batches: int = 1) -> dict[str, Any]:
        """What the manifest says of the run; ``micro_batches``: of a step, on all ranks together."""
        return {"name": self.name, "step": step, "time": time.time(), "micro_batches": micro_batches}

    def micro_batches(self, folders: list[Place]) -> int | None:
        """Of a step of this run's newest checkpoint, on all ranks; None: there is none that says it. One rank calls."""
        found = [] if self.name == NAMELESS else find_checkpoints([self.own_path.parent, *folders], self.name).own
        return found[0][1].get("micro_batches") if found else None

    @property
    def own_path(self) -> Place:
        """Where this run saves when it is stopped."""
        return place(self.root) / FOLDER / f"{self.name}.ckpt"

    @property
    def failure_folder(self) -> Path | None:
        """Where ranks that are stuck in a collective write what they can; None in a store."""
        folder = place(self.root)
        return None if isinstance(folder, StorePath) else folder / FAILURES / self.name

    def choose_checkpoint(self, asked: Any, *, fitting: bool, folders: list[Place]) -> Any:
        """The checkpoint to resume from where ``ckpt_path`` is ``asked``. All ranks call it.

        ``auto``: this run's newest intact one, opened. None, if ``fitting``: what this run left when it was stopped,
        opened, if it was. Anything else is returned as it is. ``folders`` are where the Trainer's checkpoint callbacks
        save. ConfigurationError: ``auto`` in a run that no launcher and no setting named. CheckpointNotFoundError:
        ``auto`` outside a fit, with nothing to find. CheckpointError: a checkpoint of another job that Lightning found
        by itself.
        """
        own: list[Place] = [self.own_path.parent]
        if asked is None:
            return self._newest(own, speak=False) if fitting and self.name != NAMELESS else None
        if asked != AUTO:
            self._refuse_stock_checkpoint(Path(asked))
            return asked
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

    def _newest(self, folders: list[Place], *, speak: bool) -> OpenCheckpoint | None:
        """The newest checkpoint of this run whose files all have their checksums. All ranks call it."""
        found = open_newest(folders, self.name)
        for reason in found.broken:
            rank_zero_warn(f"Passed over a broken checkpoint of run {self.name}: {reason}")
        if (checkpoint := found.newest) is not None:
            step = checkpoint.manifest.facts.run["step"]
            rank_zero_info(f"Run {self.name} goes on from step {step}: {checkpoint.path}")
            return checkpoint
        if speak:
            others = f" (there are some of {', '.join(found.others)})" if found.others else ""
            say = rank_zero_warn if self.job is not None and self.job.restarts else rank_zero_info
            say(f"No whole checkpoint of run {self.name}{others}: it starts from the beginning.")
        return None

    def _refuse_stock_checkpoint(self, path: Path) -> None:
        if not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", path.name) or path.parent.resolve() != Path(self.root).resolve():
            return
        raise CheckpointError(
            f"Lightning chose {path} by itself, since it lies in default_root_dir. It does not say which job wrote it, "
            "and may be another's: move it away, give another default_root_dir, or set ckpt_path: auto to go on from "
            "this run's own checkpoints."
        )
