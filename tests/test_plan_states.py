"""Bytes per rank: predicted by arithmetic, and counted on live tensors of real runs."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.plan_counts import MODELS, differences, names


def check(ranks: int, cases: list[tuple[str, str, str]]) -> None:
    """On the rank that holds most of a kind, counted and predicted bytes differ by less than 5 %."""
    for rows in zip(*run_distributed(differences, ranks, cases, timeout=600), strict=True):
        *case, kind, _, predicted = rows[0]
        counted = max(row[-2] for row in rows)
        assert counted == pytest.approx(predicted, rel=0.05, abs=64), (case, kind, ranks)


SAMPLE = [
    ("tied and frozen", "shard_ddp", "32-true"),
    ("Llama", "shard_ddp", "bf16-mixed"),
    ("tied and frozen", "shard_fsdp", "bf16-mixed"),
    ("convolutions", "shard_fsdp_offload", "32-true"),
    ("Llama", "shard_deepspeed_stage_1", "bf16-mixed"),
    ("convolutions", "shard_deepspeed_stage_2", "32-true"),
    ("tied and frozen", "shard_deepspeed_stage_3", "bf16-mixed"),
    ("Llama", "shard_deepspeed_stage_2_offload", "bf16-mixed"),
]


def test_predicted_bytes_are_those_that_are_counted() -> None:
    check(2, SAMPLE)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("name", names())
def test_table(ranks: int, model: str, name: str) -> None:
    precisions = ["32-true"] if name.endswith("stage_0") else ["32-true", "bf16-mixed", "16-mixed"]
    check(ranks, [(model, name, precision) for precision in precisions])
