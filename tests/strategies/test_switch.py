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
STEPS = SAVED + 10
CLIP = {"gradient_clip_val": 0.05}


def write(precision: str, folder: str) -> dict[str, dict[str, Any]]:
    """A run of each engine, which saves on the way."""
    runs = {}
    for name in NAMES:
        runs[name] = _fit(name, folder=f"{folder}/{name}", every=SAVED, steps=STEPS, precision=precision, **CLIP)
    return runs


def go_on(precision: str, folder: str, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Resume each checkpoint under an engine."""
    runs = []
    for writer, reader in pairs:
        path = f"{folder}/{writer}/step={SAVED}.ckpt"
        runs.append(_fit(reader, resume=path, steps=STEPS, precision=precision, **CLIP))
    return runs


def check(tmp_path: Path, precision: str, pairs: list[tuple[str, str]]) -> None:
    straight = run_distributed(write, 2, precision, str(tmp_path), timeout=600)
    first = stored(tmp_path / NAMES[0] / f"step={SAVED}.ckpt")
    for name in NAMES:
        for rank in straight:
            _assert_continues([rank[NAMES[0]]], [rank[name]], 0)
        path = tmp_path / name / f"step={SAVED}.ckpt"
        tensors = stored(path)
        assert tensors.keys() == first.keys()
        for key, value in tensors.items():
            assert value.dtype == first[key].dtype
            assert torch.equal(value, first[key]), (name, key)
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["engine"] == name.split("_")[1]
    resumed = run_distributed(go_on, 2, precision, str(tmp_path), pairs, timeout=60 * len(pairs))
    for rank, runs in enumerate(resumed):
        for (writer, _), run in zip(pairs, runs, strict=True):
            _assert_continues([straight[rank][writer]], [run], SAVED)


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.matrix), "bf16-mixed"])
def test_each_goes_on_with_anothers_checkpoint(tmp_path: Path, precision: str) -> None:
    # Each writer under one reader, another one for each precision, so that each reader comes too.
    shift = 5 if precision == "32-true" else 2
    check(tmp_path, precision, [(name, NAMES[(i + shift) % len(NAMES)]) for i, name in enumerate(NAMES)])


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_one_goes_on_with_every_ones_checkpoint(tmp_path: Path, precision: str) -> None:
    check(tmp_path, precision, list(itertools.product(NAMES, NAMES)))
