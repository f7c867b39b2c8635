"""Mistakes of a bare Trainer's script: said once, before anything is trained."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_shard
from lightning_shard import ConfigurationError, ShardFSDPStrategy, devices
from lightning_shard._lightning import processes
from lightning_shard.callbacks import ProfilerCallback, RunPageCallback, ThroughputCallback


def test_a_process_that_a_script_started_has_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        monkeypatch.setenv("LIGHTNING_SHARD_STARTED_BY", str(os.getpid()))
        processes.share_cores(10**6)
        assert torch.get_num_threads() == before
        monkeypatch.setenv("LIGHTNING_SHARD_STARTED_BY", "1")
        processes.share_cores(10**6)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("device", "environ", "changes"),
    [
        ("cuda", TORCHRUN, True),
        ("cpu", TORCHRUN, False),
        ("cuda", {**TORCHRUN, "OMP_NUM_THREADS": "01"}, False),  # the user's
    ],
)
def test_an_offloaded_step_under_torchrun_has_the_cores_of_its_rank(
    device: str, environ: dict[str, str], changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            devices.step_on_all_cores(torch.device(device), 2, environ, says=True)
        assert torch.get_num_threads() == (3 if changes else 1)
        assert [("uses 3 now" in str(each.message)) for each in said] == [True] * changes
        torch.set_num_threads(2)
        devices.step_on_all_cores(torch.device(device), 2, environ, says=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (ThroughputCallback, {"every_n_step": 2}, "ThroughputCallback has no argument 'every_n_step'. Did you mean"),
        (RunPageCallback, {"every_n_steps": "often"}, "every_n_steps is 'often', but must be an integer or None"),
        (ProfilerCallback, {"steps": 3}, "steps is 3, but must be a list"),
        (ShardFSDPStrategy, {"precision": "bf16-mixed"}, r"It is the Trainer's: Trainer\(precision=\.\.\., strategy"),
    ],
)
def test_arguments_in_python(kind: type, given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        kind(**given)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_progress_bar": False}
    trainer = Trainer(strategy="shard_fsdp", callbacks=[ModelCheckpoint(dirpath=taken / "runs")], **options)
    with pytest.raises(ConfigurationError, match=f"ModelCheckpoint saves into .*runs, but {taken} is no folder"):
        trainer.fit(BoringModel())
    assert trainer.global_step == 0


@pytest.mark.parametrize(("name", "near"), [("ShardFsdpStrategy", " Did you mean ShardFSDPStrategy"), ("_private", "")])
def test_names_that_the_package_does_not_have(name: str, near: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'lightning_shard' has no attribute '{name}'.{near}"):
        getattr(lightning_shard, name)


def test_a_launcher_that_starts_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
    for name, value in {**started, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="local rank 2 was started, but devices is 2"):
        Trainer(strategy="shard_fsdp", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
    processes.set_rank(0)  # else Lightning's warnings of rank 0 are none in later tests
