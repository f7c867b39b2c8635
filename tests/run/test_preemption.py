"""A fit that is told to stop: on real processes, one of which gets the signal, at every kind of moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard import ConfigurationError, EMACallback, PreemptionConfig, ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.cluster.preemption import Preempted, TimeLimit, run_name
from tests.groups import sampled
from tests.harness import ROOT, run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

STRATEGIES = {"ddp": ShardDDPStrategy, "fsdp": ShardFSDPStrategy}
RUN = "torchrun-harness"


class Told(TinyLM):
    """Draws random numbers, and validation changes a buffer of the loss; one rank is told to stop at ``moment``."""

    def __init__(self, moment: tuple[str, int] | None = None, number: int = signal.SIGUSR1) -> None:
        super().__init__(dropout=0.1)
        self.moment, self.number = moment, number
        self.validated: list[tuple[int, int]] = []
        self.epochs: list[tuple[str, int]] = []
        self.register_buffer("validations", torch.zeros(()))

    def _tell(self, *moment: Any) -> None:
        if moment == self.moment and self.trainer.global_rank == 1:
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self._tell("train", len(self.seen))
        return super().training_step(batch, batch_idx) * (1 + self.validations)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._tell("validation", self.global_step)
        self.validations += 0.1 * torch.rand(())
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, self.global_step))

    def on_train_epoch_start(self) -> None:
        self.epochs.append(("begin", self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(("end", self.current_epoch))


def _fit(engine: str, module: Told, ckpt_path: str | None = None, **trainer: Any) -> pl.Trainer:
    torch.manual_seed(3)
    callbacks = trainer.pop("callbacks", [])
    callbacks += [EMACallback(decay=0.7)] if trainer.pop("averages", False) else []
    run = quiet_trainer(
        callbacks=callbacks,
        strategy=STRATEGIES[engine](),
        default_root_dir="runs",
        num_sanity_val_steps=1,
        **{"max_epochs": 2, **trainer},
    )
    # 5 training batches an epoch and 3 of validation.
    run.fit(module, loader(4, count=40), loader(4, count=24, shuffle=False), ckpt_path=ckpt_path)
    return run


def _whole_state(module: pl.LightningModule) -> dict[str, Tensor]:
    # What a validation does to the averages of buffers is not undone.
    buffers = {} if EMACallback in map(type, module.trainer.callbacks) else dict(module.named_buffers())  # type: ignore[attr-defined]
    return {**whole_parameters(module), **{name: buffer.clone() for name, buffer in buffers.items()}}


def _stopped_and_resumed(engine: str, moment: tuple[str, int], number: int, trainer: dict[str, Any]) -> dict[str, Any]:
    whole = Told()
    _fit(engine, whole, **trainer)
    expected = _whole_state(whole)
    first, second = Told(moment, number), Told()
    before = signal.getsignal(signal.SIGUSR1)
    code = None
    try:
        _fit(engine, first, **trainer)
    except Preempted as stop:
        code = stop.code
    saved = Path("runs/preempted") / f"{RUN}.ckpt"
    step = read_manifest(saved).facts.run["step"] if saved.exists() else None
    torch.distributed.barrier()
    run = _fit(engine, second, **trainer) if code is not None else first.trainer
    torch.distributed.barrier()
    return {
        "code": code,
        "step": step,
        "handler": (before, signal.getsignal(signal.SIGUSR1)),
        "bitwise": all(torch.equal(p, expected[n]) for n, p in _whole_state(run.lightning_module).items()),
        "seen": first.seen + (second.seen if code is not None else []) == whole.seen,
        "validated": (whole.validated, first.validated + second.validated),
        "epochs": (whole.epochs, first.epochs + second.epochs),
        "steps": run.global_step,
        "left": saved.exists(),
    }


# The engine, the moment, the step after which the run stops (one step or validation batch later), the Trainer.
MOMENTS: dict[str, tuple[str, tuple[str, int], int, dict[str, Any]]] = {
    "mid-epoch": ("fsdp", ("train", 1), 3, {}),
    "in an accumulation": ("ddp", ("train", 1), 2, {"accumulate_grad_batches": 2}),
    # EMACallback averages buffers too, and has them in the module meanwhile.
    "in a validation of averages": ("ddp", ("validation", 2), 2, {"val_check_interval": 2, "averages": True}),
    "ahead of a validation in mid-epoch": ("ddp", ("train", 0), 2, {"val_check_interval": 2}),
    "the epoch's last batch, none follows": ("ddp", ("train", 3), 6, {"limit_val_batches": 0}),
    "in the last epoch's validation": ("ddp", ("validation", 10), 10, {}),
}


@pytest.mark.parametrize("moment", sampled([*MOMENTS], 0, 1, 2))
def test_stops_and_goes_on_as_if_it_never_had(moment: str) -> None:
    engine, told, step, trainer = MOMENTS[moment]
    number = signal.SIGTERM if engine == "fsdp" else signal.SIGUSR1
    for rank in run_distributed(_stopped_and_resumed, 2, engine, told, number, trainer):
        assert rank["code"] == 75
        assert rank["step"] == step
        assert rank["handler"][0] == rank["handler"][1] == signal.SIG_DFL
        assert rank["bitwise"]
        assert rank["seen"]
        assert rank["validated"][0] == rank["validated"][1]
        assert rank["epochs"][0] == rank["epochs"][1]
        assert not rank["left"]


def test_told_in_the_last_steps_it_ends_as_ever() -> None:
    trainer = {"limit_val_batches": 0, "max_steps": 4}
    for rank in run_distributed(_stopped_and_resumed, 2, "ddp", ("train", 3), signal.SIGUSR1, trainer):
        assert (rank["code"], rank["steps"], rank["left"]) == (None, 4, False)


# The parts


def test_time_limit() -> None:
    assert not TimeLimit(lambda: None, 90).is_near(1e9)
    assert not TimeLimit(lambda: 1000.0, 90).is_near()
    assert TimeLimit(lambda: 1000.0, 90).is_near(reserve=950)
    # Half of the time is there for training, however short the job.
    short = TimeLimit(lambda: 100.0, 90)
    assert short.seconds_before == 50
    assert not short.is_near(reserve=40)
    assert short.is_near(reserve=50)
    # Moved meanwhile.
    answers = iter([5000.0, 1000.0])
    moved = TimeLimit(lambda: next(answers), 90)
    assert not moved.is_near(reserve=3000)
    assert moved.is_near(reserve=4950)


ARRAY = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "68", "SLURM_ARRAY_TASK_ID": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, None, "local"),
        ({"TORCHELASTIC_RUN_ID": "a/b"}, None, "torchrun-a_b"),
        ({"SLURM_JOB_ID": "12"}, None, "slurm-12-batch"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "x"}, None, "slurm-12-0"),
        (ARRAY, "mine", "mine_1"),
    ],
)
def test_run_name(environ: dict[str, str], name: str | None, expected: str) -> None:
    assert run_name(PreemptionConfig(run=name), environ) == expected


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("signals", ("SIGKILL",), "preemption.signals has 'SIGKILL'"),
        ("exit_code", 0, "must be from 1 to 255"),
        ("save_seconds", 0.0, "must be 1 or more"),
        ("seconds_before_limit", -1.0, "must be 0 or more"),
        ("run", "a/b", "a name that a folder can have"),
    ],
)
def test_settings_that_are_refused(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        PreemptionConfig(**{field: value})


class Dies(Told):
    """In the save before the run stops."""

    def _tell(self, *moment: Any) -> None:
        if moment == self.moment:
            os.kill(os.getpid(), self.number)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.strategy._preemption.is_stopping:
            raise ValueError("disk full")


def _dies_in_the_save(every_n_train_steps: int) -> str:
    """What SLURM is told."""
    Path("scontrol").write_text(f'#!/bin/sh\necho "$@" >> {Path.cwd()}/told\n')
    Path("scontrol").chmod(0o755)
    os.environ |= {"PATH": f"{Path.cwd()}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    saves = ModelCheckpoint("saves", every_n_train_steps=every_n_train_steps)
    with pytest.raises(ValueError, match="disk full"):
        _fit("ddp", Dies(("train", 2)), callbacks=[saves], enable_checkpointing=True)
    # What gives up a save that hangs would end a process that goes on after the error.
    for thread in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        thread.join(10)  # one that is cancelled ends in a moment, which may not have come yet
        assert not thread.is_alive()
    return Path("told").read_text() if Path("told").exists() else ""


def test_a_rank_that_dies_in_the_save_requeues_the_job_that_has_a_checkpoint() -> None:
    (told,) = run_distributed(_dies_in_the_save, 1, 1)
    assert told.splitlines()[-1] == "requeue 7"
    # From its beginning it would come here again and again.
    assert run_distributed(_dies_in_the_save, 1, 100) == [""]


EARLY = """
import os, signal, sys
command, sys.argv = sys.argv[1], ["lightning-shard"]
from lightning_shard import __main__, commands

def quick(*_):
    os.kill(os.getpid(), signal.SIGUSR1)
    from lightning_shard.cluster.preemption import SignalFlag, release_signals  # and torch, which takes seconds
    flag = SignalFlag()
    flag.install_handlers(("SIGUSR1",))
    release_signals()
    return int(flag.received == signal.SIGUSR1)

commands.run_quick, sys.argv[1:] = quick, [command]
__main__.main()
"""


@pytest.mark.parametrize(("command", "code"), sampled([("fit", 1), ("validate", -signal.SIGUSR1)], 0))
def test_a_signal_before_there_is_a_trainer_is_noted(command: str, code: int) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", EARLY, command], env=environ, timeout=60, check=False)
    assert run.returncode == code


HANGING = """
import os, signal, time
from lightning_shard import PreemptionConfig, ShardDDPStrategy
from tests.models import TinyLM, loader
from tests.slurm.programs import trainer

class Hanging(TinyLM):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.global_rank == 1:
            time.sleep(600)

strategy = ShardDDPStrategy(preemption=PreemptionConfig(save_seconds=6, exit_code=76))
trainer(strategy, ".", devices=2, max_steps=50).fit(Hanging(), loader())
"""


@pytest.mark.matrix
def test_a_save_that_hangs_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "exitcode  : 76" in run.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] the save took over 6 s" in run.stderr
    assert "in on_save_checkpoint" in run.stderr
