"""The study of precisions, on a small model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.precision_study import Study
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


def _measure(strategy: str) -> dict[str, Any]:
    study = Study()
    trainer = quiet_trainer(strategy=strategy, precision="bf16-true", max_steps=6, callbacks=[study])
    model = TinyLM(dtype=torch.bfloat16, tie=True, lr=1e-5)
    torch.manual_seed(1)
    trainer.fit(model, loader())
    return {**study.results(), "seen": model.seen}


@pytest.mark.matrix
def test_the_study_sees_equal_engines_as_equal_and_lost_updates_as_lost() -> None:
    fsdp, zero, plain = (
        run_distributed(_measure, 2, name)
        for name in ("shard_fsdp_aligned", "shard_deepspeed_stage_3_aligned", "shard_fsdp")
    )
    assert fsdp[0]["seen"] != fsdp[1]["seen"]
    assert fsdp[0]["losses"] == fsdp[1]["losses"] == zero[0]["losses"]
    assert fsdp[0]["digest"] == fsdp[1]["digest"] == zero[0]["digest"]
    assert len(fsdp[0]["losses"]) == len(fsdp[0]["seconds"]) == 6
    # The same weights see the same first batch; what differs is what the steps do to them.
    assert plain[0]["losses"][0] == fsdp[0]["losses"][0]
    assert plain[0]["digest"] != fsdp[0]["digest"]
    # Six steps of 1e-5 are below half of bf16's spacing for weights above 0.016; most are, being drawn from 0.3.
    assert 0 < plain[0]["moved"] < 0.5 < fsdp[0]["moved"] < 1
