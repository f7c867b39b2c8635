"""One checkpoint for every engine: whatever wrote it, whatever goes on with it takes the steps of a run that never
stopped, bit by bit.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.compare import stored
from tests.harness import run_distributed
from tests.resume.test_resume import _assert_continues, _fit

NAMES = [
    "shard_ddp_aligned",
    "shard_fsdp_aligned",
    "shard_fsdp_grad_op_aligned",
    "shard_fsdp_hybrid_aligned",
    "shard_fsdp_offload_aligned",
    "shard_deepspeed_stage_1_aligned",
    "shard_deepspeed_stage_2_aligned",
    "shard_deepspeed_stage_3_aligned",
    "shard_deepspeed_stage_3_offload_aligned",
]
SAVED = 4

CLIP = {"gradient_clip_val": 0.05}


def write(precision: str, folder: str, names: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """A run of each engine, which saves on the way."""
    runs = {}
    for name in names:
        runs[name] = _fit(name, folder=f"{folder}/{name}", every=SAVED, steps=steps, precision=precision, **CLIP)
    return runs


def go_on(precision: str, folder: str, pairs: list[tuple[str, str]], steps: int) -> list[dict[str, Any]]:
    """Resume each checkpoint under an engine."""
    runs = []
    for writer, reader in pairs:
        path = f"{folder}/{writer}/step={SAVED}.ckpt"
        runs.append(_fit(reader, resume=path, steps=steps, precision=precision, **CLIP))
    return runs


def check(tmp_path: Path, precision: str, pairs: list[tuple[str, str]], steps: int) -> None:
    names = list(dict.fromkeys(writer for writer, _ in pairs))
    straight = run_distributed(write, 2, precision, str(tmp_path), names, SAVED + steps, timeout=600)
    first = stored(tmp_path / names[0] / f"step={SAVED}.ckpt")
    for name in names:
        for rank in straight:
            _assert_continues([rank[names[0]]], [rank[name]], 0)
        path = tmp_path / name / f"step={SAVED}.ckpt"
        tensors = stored(path)
        assert tensors.keys() == first.keys()
        for key, value in tensors.items():
            assert value.dtype == first[key].dtype
            assert torch.equal(value, first[key]), (name, key)
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["engine"] == name.split("_")[1]
    resumed = run_distributed(go_on, 2, precision, str(tmp_path), pairs, SAVED + steps, timeout=60 * len(pairs))
    for rank, runs in enumerate(resumed):
        for (writer, _), run in zip(pairs, runs, strict=True):
            _assert_continues([straight[rank][writer]], [run], SAVED)


def test_each_goes_on_with_anothers_checkpoint(tmp_path: Path) -> None:
    # One of each kind writes, and another one reads; the matrix has all pairs.
    few = ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_deepspeed_stage_3_aligned"]
    check(tmp_path, "bf16-mixed", list(zip(few, [few[2], *few[:2]], strict=True)), steps=4)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_one_goes_on_with_every_ones_checkpoint(tmp_path: Path, precision: str) -> None:
    check(tmp_path, precision, list(itertools.product(NAMES, NAMES)), steps=10)
