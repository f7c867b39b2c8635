"""Bytes per rank: predicted before a run, and counted on its live tensors.

``pytest -m matrix`` has every engine, three models, world sizes 1, 2 and 4.
"""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.plan_counts import MODELS, differences, names
from tests.plan_peaks import peaks


def check(ranks: int, cases: list[tuple[str, str, str]]) -> None:
    """On the rank that holds most of a kind, counted and predicted bytes differ by less than 5 %."""
    for rows in zip(*run_distributed(differences, ranks, cases, timeout=600), strict=True):
        *case, kind, _, predicted = rows[0]
        counted = max(row[-2] for row in rows)
        # A few scalars may be left.
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


def check_peak(ranks: int, model: str, name: str, checkpointing: bool, *, within: float) -> None:
    """The most that a step holds at one time, where activations are most of it, is as predicted."""
    precision = "32-true" if name in ("shard_ddp", "shard_deepspeed_stage_0") else "bf16-mixed"
    found = run_distributed(peaks, ranks, model, name, precision, checkpointing, batch_size=64, timeout=300)
    counted, predicted, *details = max(found)
    assert counted == pytest.approx(predicted, rel=within), details


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("shard_ddp", False), ("shard_fsdp", True), ("shard_deepspeed_stage_3", False)]
)
def test_predicted_peak_is_the_one_that_is_counted(name: str, checkpointing: bool) -> None:
    check_peak(2, "tied and frozen", name, checkpointing, within=0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("name", names())
def test_table_of_states(ranks: int, model: str, name: str) -> None:
    precisions = ["32-true"] if name.endswith("stage_0") else ["32-true", "bf16-mixed", "16-mixed"]
    check(ranks, [(model, name, precision) for precision in precisions])


# The buffers that NVMe is read into are locked memory, and no tensors.
IN_MEMORY = [name for name in names() if not name.endswith("nvme")]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", ["tied and frozen", "Llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", IN_MEMORY)
def test_table_of_peaks(ranks: int, model: str, name: str, checkpointing: bool) -> None:
    if checkpointing and name == "shard_ddp":
        pytest.skip("shard_ddp has no activation checkpointing of its own")
    # With one process offload makes fewer copies, and ZeRO-2 and -3 reduce nothing: up to 8 % less was counted.
    check_peak(ranks, model, name, checkpointing, within=0.1 if ranks == 1 else 0.05)
