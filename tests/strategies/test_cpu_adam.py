"""DeepSpeedCPUAdam: with offload in every precision, and alone in the low-memory rows, where others are refused."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import ShardPrecision, registry
from lightning_shard.errors import PrecisionError
from lightning_shard.precision.policy import policy_from
from lightning_shard.precision.words import PRECISIONS
from tests.compiled import NVME, need
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import differences, relative

STEPS = 6
SAVED = 2
OPTIMIZERS = ("AdamW", "CPUAdam", "CPUAdam with 16-bit state")

# Stage 0 is no engine of DeepSpeed's.
NAMES = [name for name in registry.PRESETS if "deepspeed" in name and "stage_0" not in name]


class Chosen(TinyLM):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.chosen = optimizer

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        # AdamW's default eps is zero in fp16.
        if self.chosen == "AdamW":
            return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.0)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, lr=1e-2, eps=1e-3, fp32_optimizer_states=self.chosen == "CPUAdam")


def refusal(name: str, precision: str, optimizer: str) -> str | None:
    """The text of a combination's error. None: it runs."""
    if name.endswith("_aligned") or precision not in ("bf16-true", "16-true"):
        return None
    if "offload" not in name:
        # On the host, where DeepSpeedCPUAdam steps what is not offloaded as well.
        return "under DeepSpeedCPUAdam. Use shard_deepspeed_stage_2_offload" if precision == "16-true" else None
    if optimizer == "AdamW":
        return "configure_optimizers returns AdamW. Return deepspeed.ops.adam.DeepSpeedCPUAdam("
    if optimizer == "CPUAdam" and (precision == "bf16-true" or "nvme" in name):
        return "DeepSpeedCPUAdam with fp32_optimizer_states=True, its default. Return"
    return None


def fit(name: str, precision: str, optimizer: str, *, resume: str | None = None, **trainer: Any) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = Chosen(optimizer), Final()
    save = ModelCheckpoint(dirpath="saved", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    quiet_trainer(
        strategy=name,
        plugins=[ShardPrecision(precision)],
        max_steps=STEPS,
        callbacks=[final, save] if trainer else [final],
        enable_checkpointing=bool(trainer),
        **trainer,
    ).fit(module, loader(), ckpt_path=resume)
    return {"parameters": final.parameters, "optimizer": final.optimizer, "losses": module.losses}


def rows(cases: list[tuple[str, str, str]]) -> None:
    for name, precision, optimizer in cases:
        expected = refusal(name, precision, optimizer)
        if expected is not None:
            with pytest.raises(PrecisionError) as caught:
                fit(name, precision, optimizer)
            assert expected in str(caught.value), (name, precision, optimizer)
            continue
        run = fit(name, precision, optimizer)
        master = policy_from(precision, aligned=name.endswith("_aligned")).master
        stepped = {key.rpartition(".")[0] for key in run["optimizer"]}
        assert {run["parameters"][fqn].dtype for fqn in stepped} == {master}, (name, precision, optimizer)
        slots = {value.dtype for key, value in run["optimizer"].items() if not key.endswith(".step")}
        assert slots == {torch.float32 if optimizer == "CPUAdam" else master}, (name, precision, optimizer)
        assert all(torch.isfinite(value).all() for value in run["parameters"].values())
        assert len(set(run["losses"])) == STEPS


def test_a_sample_of_the_table(request: pytest.FixtureRequest) -> None:
    need(request, "cpu_adam")
    cases = [("shard_deepspeed_stage_2_offload", "bf16-true", optimizer) for optimizer in OPTIMIZERS]
    cases += [
        ("shard_deepspeed_stage_3_offload", "16-true", "AdamW"),
        ("shard_deepspeed_stage_3_offload", "16-true", "CPUAdam with 16-bit state"),
        ("shard_deepspeed_stage_3_offload_aligned", "16-true", "CPUAdam"),
        ("shard_deepspeed_stage_3", "16-true", "AdamW"),
    ]
    run_distributed(rows, 2, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_the_table(request: pytest.FixtureRequest, name: str) -> None:
    need(request, "cpu_adam")
    if "nvme" in name:
        need(request, *NVME)
    cases = [(name, precision, optimizer) for precision, optimizer in itertools.product(PRECISIONS, OPTIMIZERS)]
    run_distributed(rows, 2, cases, timeout=600)


def beside_torch() -> None:
    name = "shard_deepspeed_stage_2_offload_aligned"
    straight = fit(name, "bf16-mixed", "CPUAdam", gradient_clip_val=0.05)
    resumed = fit(name, "bf16-mixed", "CPUAdam", resume=f"saved/step={SAVED}.ckpt", gradient_clip_val=0.05)
    assert resumed["losses"] == straight["losses"][SAVED:]
    for part in ("parameters", "optimizer"):
        assert differences(straight[part], resumed[part]) == {}
    # In fp32, since in bf16 a value that is rounded the other way in forward is off by 2**-9.
    ours, torchs = fit(name, "32-true", "CPUAdam"), fit("shard_fsdp_aligned", "32-true", "AdamW")
    # The same formula with other roundings, at most some 1e-7 of a value in each step.
    assert 0 < relative(torchs["parameters"], ours["parameters"]) < 1e-5


def test_cpu_adam_resumes_bitwise_and_steps_as_torchs_adamw(request: pytest.FixtureRequest) -> None:
    need(request, "cpu_adam")
    run_distributed(beside_torch, 2)
