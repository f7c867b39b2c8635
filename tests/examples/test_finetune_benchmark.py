"""Docstrings as labelled data, and the benchmark that fine-tunes a classifier on them; no time is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.benchmarks.finetuning import FineTuning, train, trial
from examples.benchmarks.processes import MEBIBYTE, Place
from tests.harness import run_distributed


def _run(encoder: str, **options: Any) -> FineTuning:
    fixed: dict[str, Any] = {"precision": "32-true", "device": "cpu", "processes": 2, "max_length": 8}
    return FineTuning(encoder=encoder, **fixed, **options)


def _train(encoder: str) -> tuple[Any, ...]:
    place = Place(rank=dist.get_rank(), device=torch.device("cpu"))
    return (
        train(place, "shard_ddp", _run(encoder, batch_size=8, limit=32, epochs=2)),
        # No process fits into less than nothing.
        trial(place, "shard_ddp", _run(encoder, batch_size=1), -4096 * MEBIBYTE),
    )


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_epochs_are_timed_and_told_with_what_was_learned(encoder: Path) -> None:
    for found, trial_without_memory in run_distributed(_train, 2, str(encoder)):
        assert found["samples"] == 32
        assert len(found["epochs"]) == 2
        for epoch in found["epochs"]:
            assert epoch["train_seconds"] > 0
            assert epoch["evaluation_seconds"] > 0
            assert 0 <= epoch["f1"] <= 1
            # Of 32 docstrings.
            assert epoch["accuracy"] * 32 == pytest.approx(round(epoch["accuracy"] * 32), abs=1e-4)
        assert trial_without_memory is None
