"""Which checkpoint ``ckpt_path: auto`` takes: this run's, whole, the newest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import CheckpointError, CheckpointNotFoundError, PreemptionConfig
from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.load import find_checkpoints
from lightning_shard.registry import build
from lightning_shard.run.preemption_save import RunIdentity
from tests.checkpoint.calls import save_tensors
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


def _save(path: Path, run: dict[str, Any]) -> Path:
    info = Facts(engine="ddp", policy="fp32", run=run)
    save_tensors(path, tensors={"model.w": torch.ones(3)}, trainer_state={}, facts=info)
    return path


def _run(name: str, step: int, time: float = 0.0) -> dict[str, Any]:
    return {"name": name, "step": step, "time": time}


def test_the_newest_of_the_run_over_all_folders(tmp_path: Path) -> None:
    for number, (name, step, time) in enumerate([("a", 3, 9.0), ("a", 5, 1.0), ("a", 5, 2.0), ("b", 8, 3.0)]):
        _save(tmp_path / str(number % 2) / f"{number}.ckpt", _run(name, step, time))
    found = find_checkpoints([tmp_path / "0", tmp_path / "1", tmp_path / "0"], "a")
    assert [(Path(path).name, run["step"]) for path, run in found.own] == [("2.ckpt", 5), ("1.ckpt", 5), ("0.ckpt", 3)]
    assert find_checkpoints([tmp_path / "missing"], "a").own == ()


def test_a_requeued_job_goes_on_from_its_own_and_not_from_where_it_began(tmp_path: Path) -> None:
    began = _save(tmp_path / "began.ckpt", _run("another", 3))
    for restarts, own, expected in (("0", True, began), ("1", True, None), ("1", False, began)):
        root = tmp_path / f"{restarts}{own}"
        environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        identity = RunIdentity.read(PreemptionConfig(), environ, str(root))
        if own:
            _save(Path(str(identity.own_path)), _run(identity.name, 9))
        for fitting, wanted in ((True, expected), (False, began)):
            chosen = identity.choose_checkpoint(began, fitting=fitting, folders=[])
            assert getattr(chosen, "path", chosen) == (wanted or identity.own_path)


def test_what_is_no_state_of_a_run_is_not_taken(tmp_path: Path) -> None:
    _save(tmp_path / "weights.ckpt", {})
    half = _save(tmp_path / "half.ckpt", _run("a", 1))
    (half / "manifest.json").unlink()
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"PK")
    shutil.copytree(_save(tmp_path / "seen.ckpt", _run("a", 2)), tmp_path / ".seen.ckpt.tmp-0123")
    assert [run["step"] for _, run in find_checkpoints([tmp_path], "a").own] == [2]


def test_a_broken_one_is_named(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _save(tmp_path / f"{step}.ckpt", _run("a", step))
    data = next((tmp_path / "2.ckpt").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "3.ckpt" / "manifest.json").write_text("{")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")  # of another program
    found = find_checkpoints([tmp_path], "a")
    assert [run["step"] for _, run in found.own] == [1]
    cut, unknown = sorted(found.broken)
    assert cut.startswith(f"{tmp_path}/2.ckpt lacks __0_0.distcp")
    assert unknown.startswith(f"{tmp_path}/3.ckpt/manifest.json is not a checkpoint's manifest")


def _fit(
    ckpt_path: str | None, steps: int, *, run: str | None = "mine", folder: str = "runs", strategy: str = "shard_ddp"
) -> int:
    """Optimizer steps that this fit has made itself."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = TinyLM()
    save_all = ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=build(strategy, preemption=PreemptionConfig(run=run)),
        max_steps=steps,
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[save_all],
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return len(module.losses)


def _auto() -> dict[str, Any]:
    results: dict[str, Any] = {"none": _fit("auto", 4)}
    results["not asked"] = _fit(None, 2)
    results["another run's"] = _fit("auto", 2, run="other")
    # Its size is right, its contents are not.
    if torch.distributed.get_rank() == 0:
        newest = Path(find_checkpoints(["runs/checkpoints"], "mine").own[0][0])
        data = next(newest.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    results["broken"] = _fit("auto", 5)
    strategy = build("shard_ddp", preemption=PreemptionConfig(run="mine"))
    module, trainer = TinyLM(), quiet_trainer(strategy=strategy, default_root_dir="empty")
    with pytest.raises(CheckpointNotFoundError, match="ckpt_path is auto, but there is no whole checkpoint"):
        trainer.validate(module, loader(), ckpt_path="auto", verbose=False)
    Path("runs/hpc_ckpt_3.ckpt").write_bytes(b"PK")  # left by stock Lightning in some job
    with pytest.raises(CheckpointError, match=r"hpc_ckpt_3\.ckpt by itself"):
        _fit("runs/hpc_ckpt_3.ckpt", 1)
    return results


def test_auto() -> None:
    expected = {"none": 4, "not asked": 2, "another run's": 2, "broken": 3}
    assert run_distributed(_auto, 2) == [expected] * 2
