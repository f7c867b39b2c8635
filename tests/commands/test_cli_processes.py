"""The command line with several processes: which rank speaks, who ends whom, and the relaunch of both commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_shard import ConfigurationError, DataError, ShardCLI
from lightning_shard._lightning.processes import take_children
from lightning_shard.cluster.traces import words_of
from lightning_shard.commands import failures
from tests.harness import ROOT

DEMO = "lightning.pytorch.demos.boring_classes"
BASE = {
    "seed_everything": 1,
    "model": "usercode.Model",
    "data": f"{DEMO}.BoringDataModule",
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"class_path": "ShardFSDPStrategy", "init_args": {"aligned": True}},
        "max_steps": 2,
        "limit_val_batches": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}
USER_CODE = """
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_shard import DataError

class Model(BoringModel):
    def __init__(self, fails: int | None = None):
        super().__init__()
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.fails:
            raise DataError(f"no batch on rank {self.fails}")
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "0", "SLURM_PROCID": "0"}, 3),  # torchrun inside a SLURM step
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, 0),  # Lightning's own launcher
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "SLURM_PROCID": "0"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, 5),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1),
    ],
)
def test_global_rank(environ: dict[str, str], rank: int) -> None:
    assert failures.global_rank(environ) == rank


def test_other_ranks_wait_and_say_who_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", waited.append)
    monkeypatch.setattr(sys, "argv", ["lightning-shard"])
    for rank, start in (("0", "error: "), ("1", "[rank 1] error: ")):
        with pytest.raises(SystemExit) as ended:
            ShardCLI(args=["fit"], environ={"RANK": rank})
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(start)
    # Rank 0 speaks at once; the other only when rank 0 has not ended it in the meantime.
    assert waited == [failures._SILENCE_SECONDS]


def test_what_is_a_mistake() -> None:
    def raised(error: Exception) -> Exception:
        try:
            raise error
        except Exception as caught:
            return caught

    assert failures.is_mistake(raised(ConfigurationError("x")))
    assert failures.is_mistake(raised(DataError("x")))
    assert not failures.is_mistake(raised(ValueError("from this file, which is no library")))
    assert not failures.is_mistake(raised(RuntimeError("x")))
    assert failures.user_frame(raised(DataError("x"))).startswith(__file__)


def test_children_are_taken_and_ended() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    meek = "import time; print(flush=True); time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (stubborn, meek)]
    for process in processes:
        process.stdout.readline()
    launcher = SimpleNamespace(procs=list(processes))
    children = take_children(SimpleNamespace(strategy=SimpleNamespace(launcher=launcher)))
    assert children == processes
    assert launcher.procs == []  # what Lightning's observer looks at
    assert failures.wait_for_children(children, 0.0) == [None, None]
    failures.terminate_children(children)
    assert [child.returncode for child in children] == [-signal.SIGKILL, -signal.SIGTERM]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "usercode.py").write_text(USER_CODE)
    return tmp_path


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a session of its own, so that what it leaves behind can be seen."""
    environ = {name: value for name, value in os.environ.items() if not re.search("RANK|MASTER|SLURM", name)}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=240)
        # Both pipes are closed, so whoever still lives will end at once, or never.
        deadline = time.monotonic() + 10
        while _living(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _living(process.pid)
    finally:
        for pid in _living(process.pid):
            os.kill(pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, error)


def _living(group: int) -> list[int]:
    """Processes of a process group that are no zombies (which a container's first process may never reap)."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(of_group) == group and state not in "ZX":
            living.append(int(stat.parent.name))
    return living


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.matrix
def test_a_mistake_on_one_rank_ends_all(folder: Path) -> None:
    # Rank 1 alone: rank 0 only sees that its peer is gone.
    run = _run([sys.executable, "-m", "lightning_shard", "fit", "--config", "base.yaml", "--model.fails", "1"], folder)
    assert run.returncode == 2, run.stderr
    assert "[rank 1] error: no batch on rank 1" in run.stderr
    assert run.stderr.count("error: ") == 1
    assert "Traceback" not in run.stderr


class Missing(torch.utils.data.Dataset[torch.Tensor]):
    """Its reader says in several lines that a file is not there."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("no image\n    at all") from error


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        (1, ValueError, "no image\n    at all (in DataLoader worker process 0)"),
    ],
)
def test_an_error_in_a_worker_process_is_said_without_its_frames(index: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        next(iter(torch.utils.data.DataLoader(Missing(), sampler=[index], num_workers=1)))
    assert words_of(caught.value) == words
    place = failures.user_frame(caught.value)
    assert place is not None
    assert place.startswith(f"{__file__}:")
    assert place.endswith(", in __getitem__")
    assert not failures.is_mistake(caught.value)
