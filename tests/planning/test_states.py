"""Peaks of a step on each rank: predicted before a run, and counted on its live tensors.

``pytest -m matrix`` has every engine, three models, world sizes 1, 2 and 4.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_shard.engines.transforms import Checkpointing
from tests.groups import sampled
from tests.harness import run_distributed
from tests.planning.counts import MODELS, names
from tests.planning.peaks import peaks


def check_peak(
    ranks: int,
    model: str,
    name: str,
    checkpointing: Checkpointing,
    *,
    batch_size: int = 64,
    micro_batches: int = 1,
    precision: str = "",
    within: float = 0.05,
    **settings: Any,
) -> None:
    """The most that a step holds at one time is as predicted; at 64 samples activations are most of it, at 8 states."""
    precision = precision or ("32-true" if name == "shard_ddp" else "bf16-mixed")
    case = (model, name, precision, checkpointing, batch_size, micro_batches)
    found = run_distributed(peaks, ranks, *case, timeout=300, **settings)
    counted, predicted, *details = max(found)
    # What is not the step's, such as the batches of a loader, is less than 5 % of these models.
    assert counted == pytest.approx(predicted, rel=within), (case, details)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    sampled([("shard_ddp", "units"), ("shard_fsdp", "selective"), ("shard_deepspeed_stage_3", None)], 1),
)
def test_predicted_peak_is_the_one_that_is_counted(name: str, checkpointing: Checkpointing) -> None:
    check_peak(2, "tied and frozen", name, checkpointing)


@pytest.mark.parametrize("sync", ["boundary", "micro_batch"])
def test_sums_of_micro_batches_lie_beside_buckets(sync: str) -> None:
    settings = {"gradient_as_bucket_view": True, "accumulate_sync": sync}
    check_peak(2, "tied and frozen", "shard_ddp", None, batch_size=8, micro_batches=2, within=0.01, **settings)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("checkpointing", [None, "selective", "units"])
@pytest.mark.parametrize("name", names())
def test_table_of_peaks(ranks: int, model: str, name: str, checkpointing: Checkpointing) -> None:
    check_peak(ranks, model, name, checkpointing)


@pytest.mark.matrix
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_fsdp_offload", "shard_deepspeed_stage_1"])
def test_peaks_of_accumulation_where_states_are_most(name: str, micro_batches: int) -> None:
    check_peak(2, "tied and frozen", name, None, batch_size=8, micro_batches=micro_batches)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("model", ["LoRA", "manual"])
@pytest.mark.parametrize("stage", ["ddp", "fsdp", *(f"deepspeed_stage_{s}" for s in (1, 2, 3))])
def test_peaks_of_adapters_and_of_two_optimizers(stage: str, model: str, batch_size: int, ranks: int) -> None:
    if "LoRA" in model:
        pytest.importorskip("peft")
    # Of what owners of full parameters receive, gloo's thread may hold the last a moment longer on a busy machine.
    within = 0.06 if model == "manual" and stage.startswith("deepspeed") else 0.015
    check_peak(ranks, model, f"shard_{stage}", None, batch_size=batch_size, precision="bf16-mixed", within=within)
