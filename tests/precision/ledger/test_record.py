"""The ledger says what dtypes are, from live tensors, and changes no number of the run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lightning_shard import run as parts
from lightning_shard.precision.ledger import Ledger
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, whole_parameters
from tests.precision.ledger.zoo import ENGINES, Zoo, batches, fit

BF16, FP32 = torch.bfloat16, torch.float32


def ledgers(
    engines: list[str], model: str, precision: str, options: dict[str, Any], given: dict[str, Any]
) -> dict[str, Ledger]:
    result = {}
    for engine in engines:
        module, data = (Zoo(), batches()) if model == "zoo" else (TinyLM(**given), loader())
        result[engine] = fit(engine, module, data, precision, **options).strategy.ledger
    return result


def measured(engines: list[str], model: str, precision: str, given: Any = None, **options: Any) -> dict[str, Ledger]:
    """Every rank's ledgers are equal, and every engine's JSON form is; engine -> rank 0's."""
    first, second = run_distributed(ledgers, 2, engines, model, precision, options, given or {})
    for engine, ledger in first.items():
        assert ledger.to_json() == second[engine].to_json()
        assert json.dumps(ledger.to_json()) == json.dumps(first[engines[0]].to_json())
        assert ledger.reduced_in
    return first


def stages(ledger: Ledger, name: str) -> dict[str, str]:
    """Stage -> dtype of a tensor; it must have had just one in each."""
    found = ledger.entries[name].stages
    assert all(len(dtypes) == 1 for dtypes in found.values()), found
    return {stage: str(next(iter(dtypes))).removeprefix("torch.") for stage, dtypes in found.items()}


IN_FP32 = dict.fromkeys(["loaded", "prepared", "optimizer", "gradient", "step"], "float32")
ADAMW = dict.fromkeys(["state.exp_avg", "state.exp_avg_sq", "state.step"], "float32")
MIXED = {**IN_FP32, **ADAMW}


def test_bf16_mixed_of_a_model_loaded_in_bf16() -> None:
    found = measured(["ddp", "full"], "tiny", "bf16-mixed", {"dtype": BF16, "tie": True})
    for ledger in found.values():
        assert stages(ledger, "blocks.0.up.weight") == {**MIXED, "loaded": "bfloat16"}
        # On the LightningModule itself, and made after the cast.
        assert stages(ledger, "shift") == MIXED
        for name in ("frozen", "blocks.0.scale"):
            assert stages(ledger, name) == dict.fromkeys(["loaded", "prepared", "step"], "float32")
        assert "head.weight" not in ledger.entries  # the tie's other name
        assert ledger.reduced_in == {FP32}


def test_frozen_backbone_batch_norm_buffers_and_metrics_in_stages_and_table() -> None:
    for ledger in measured(["full", "hybrid", "offload"], "zoo", "bf16-mixed").values():
        frozen = dict.fromkeys(["loaded", "prepared", "step"], "bfloat16")
        assert stages(ledger, "backbone.0.weight") == frozen
        assert stages(ledger, "adapter.weight") == stages(ledger, "down.weight") == MIXED
        assert stages(ledger, "norm.weight") == MIXED
        kept = dict.fromkeys(["loaded", "prepared", "step"], "float32")
        assert stages(ledger, "frequencies") == stages(ledger, "norm.running_var") == kept
        assert stages(ledger, "mean.mean_value") == kept
        assert ledger.entries["mean.mean_value"].kind == "metric state"
        lines = ledger.table().splitlines()
        assert lines[0].split()[3:] == [*("count", "loaded", "prepared", "optimizer", "gradient", "step", "state")]
        assert ["trainable", "5", *["fp32"] * 6] in [line.split() for line in lines]
        assert ["buffer", "3", "fp32", "fp32", *["-"] * 2, "fp32"] in [line.split()[:7] for line in lines]
        assert lines[-1] == "gradients reduced in: fp32"
        assert sum(row["count"] for row in ledger.to_json()["tensors"]) == len(ledger.entries)


def test_gradients_held_between_micro_batches_and_modules_outside_of_fsdp() -> None:
    outside = {"ignored_modules": ["LayerNorm"], "activation_checkpointing": "units", "accumulate_sync": "boundary"}
    for engine, settings in (("full", outside), ("ddp", {"accumulate_sync": "micro_batch"})):
        options = {"accumulate_grad_batches": 2, "strategy": settings}
        ledger = measured([engine], "tiny", "bf16-mixed", **options)[engine]
        assert stages(ledger, "head.weight") == {**MIXED, "accumulated": "float32"}
        assert stages(ledger, "shift")["accumulated"] == "float32"
        assert stages(ledger, "blocks.1.norm.weight") == {**MIXED, "accumulated": "float32"}


# The run is not changed


def numbers(engine: str, model: str, precision: str, options: dict[str, Any], installed: bool) -> dict[str, Any]:
    module, data = (Zoo(), batches()) if model == "zoo" else (TinyLM(tie=True, dropout=0.1), loader())
    with pytest.MonkeyPatch.context() as patch:
        if not installed:
            patch.setattr(parts, "DtypeLedger", lambda *args, **kwargs: None)
        trainer = fit(engine, module, data, precision, steps=4, **options)
    assert (trainer.strategy.ledger is not None) == installed
    return {"parameters": whole_parameters(module), "buffers": dict(module.named_buffers()), "seen": module.seen}


def with_and_without(engines: list[str], *args: Any) -> list[dict[str, Any]]:
    return [numbers(engine, *args, installed) for engine in engines for installed in (True, False)]


def assert_equal_numbers(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("parameters", "buffers"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert tensor.dtype == other[part][name].dtype
            assert torch.equal(tensor, other[part][name]), name


@pytest.mark.parametrize(
    ("engines", "model", "options"),
    sampled([(["ddp", "full"], "zoo", {"gradient_clip_val": 0.05}), (list(ENGINES), "tiny", {})], 0),
)
def test_recording_changes_no_number_and_engines_agree(engines: list[str], model: str, options: dict[str, Any]) -> None:
    ranks = run_distributed(with_and_without, 2, engines, model, "bf16-mixed", options, timeout=240)
    assert ranks[0][0]["seen"] != ranks[1][0]["seen"]
    for runs in ranks:
        for run in runs[1:]:
            assert_equal_numbers(runs[0], run)
