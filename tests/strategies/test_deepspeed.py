"""ShardDeepSpeedStrategy under the Trainer: models and loops of every kind take the steps of FSDP, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.precision.ledger import STATE
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import VOCAB, Block, TinyLM
from tests.strategies.engines import differences
from tests.strategies.zero import OFFLOADED, STAGES, Manual, check_equal, fit, fit_all


class Adapter(TinyLM):
    """All frozen but the head and the module's own parameter; the optimizer is given the frozen ones too."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            self.embed.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ResettableBlock(Block):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.0 + 2.0**-12)


class Meta(TinyLM):
    """Built on the meta device."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.meta = True
        super().configure_model()
        for block in self.blocks:
            block.__class__ = ResettableBlock


class InZeroInit(TinyLM):
    """Built by the user under DeepSpeed's own context, which cuts each layer as it is made."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        import deepspeed

        torch.manual_seed(self.seed)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(dtype=torch.float32, config_dict_or_path=config):
            self.embed = nn.Embedding(VOCAB, self.width)
            self.blocks = nn.ModuleList(Block(self.width, self.dropout) for _ in range(self.depth))
            self.head = nn.Linear(self.width, VOCAB, bias=False)
        self.frozen = nn.Parameter(torch.full((self.width,), 0.5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(self.width))


class Early(TinyLM):
    """Uses a parameter in the first of two micro-batches alone."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "early"):
            self.early = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (0 if batch_idx % 2 else self.early.sum())


def _overlapped(accumulated: dict[type[TinyLM], int]) -> list[Any]:
    """The differences that overlap makes for each module, whose gradients are accumulated."""
    found = []
    for kind, batches in accumulated.items():
        trainer = {"max_steps": 3, "accumulate_grad_batches": batches}
        buckets = [{"overlap_comm": overlaps, "reduce": 500} for overlaps in (False, True)]
        plain, overlapped = (fit("zero_1", kind, "32-true", {"buckets": each}, trainer) for each in buckets)
        found += [differences(plain[part], overlapped[part]) for part in ("parameters", "optimizer")]
    return found


@pytest.mark.matrix
def test_stage_1_reduces_all_that_overlap_leaves() -> None:
    assert run_distributed(_overlapped, 2, {Manual: 1, Early: 2}) == [[{}] * 4] * 2


@pytest.mark.matrix
def test_manual_optimization() -> None:
    check_equal([*STAGES, *OFFLOADED], Manual)
    check_equal(["zero_2", "zero_3", *OFFLOADED], Manual, "bf16-mixed", every=2, trainer={"max_steps": 3})


@pytest.mark.matrix
def test_adapters_over_a_frozen_bf16_model() -> None:
    ranks = check_equal(["zero_3", "zero_2_offload"], Adapter, "bf16-mixed", dtype=torch.bfloat16)
    for engine, run in ranks[0].items():
        assert {name.split(".")[0] for name in run["optimizer"]} == {"head", "shift"}
        for stage in ("optimizer", "gradient", "step", f"{STATE}exp_avg"):
            assert run["ledger"]["head.weight"].column(stage) == {torch.float32}, (engine, stage)
        assert run["reductions"] == {torch.float32}


@pytest.mark.matrix
def test_models_on_the_meta_device_and_in_zero_init() -> None:
    check_equal(["zero_2", "zero_3"], Meta, "bf16-mixed")
    # The user's own context leaves another F.linear behind, which the contract does not allow.
    [rank, _] = run_distributed(fit_all, 2, ["zero_3"], InZeroInit, "bf16-mixed", {}, {}, timeout=120)
    [whole, _] = run_distributed(fit_all, 2, ["full"], TinyLM, "bf16-mixed", {}, {}, timeout=120)
    assert differences(rank["zero_3"]["parameters"], whole["full"]["parameters"]) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["units", "offload", "selective"])
def test_activation_checkpointing_changes_no_number(kind: str) -> None:
    engines = ["zero_3"] if kind == "selective" else STAGES
    check_equal(engines, TinyLM, "bf16-mixed", strategy={"activation_checkpointing": kind})


@pytest.mark.matrix
def test_low_memory_steps_bf16_parameters() -> None:
    ranks = check_equal(["zero_1", "zero_3"], TinyLM, "bf16-true", strategy={"aligned": False})
    values = [*ranks[0]["zero_1"]["parameters"].values(), *ranks[0]["zero_1"]["optimizer"].values()]
    assert {value.dtype for value in values} == {torch.bfloat16, torch.float32}  # fp32: Adam's step and `frozen`
    assert ranks[0]["zero_3"]["parameters"]["head.weight"].dtype == torch.bfloat16


@pytest.mark.matrix
def test_a_plain_name_reduces_in_the_dtype_that_it_is_told() -> None:
    strategy = {"aligned": False, "communication_data_type": "bf16"}
    [rank, _] = run_distributed(fit_all, 2, STAGES, TinyLM, "bf16-mixed", strategy, {}, timeout=120)
    for stage in STAGES:
        assert rank[stage]["reductions"] == {torch.bfloat16}, stage


class Sometimes(TinyLM):
    """A block that every other batch goes around; without momentum and decay, no gradient means no step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        around = batch_idx % 2 == 1
        skipped = self.blocks[1].register_forward_hook(lambda _, args, output: args[0]) if around else None
        try:
            return super().training_step(batch, batch_idx)
        finally:
            if skipped is not None:
                skipped.remove()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("precision", "engines"),
    sampled(
        [
            ("bf16-mixed", ["zero_1", "zero_2_offload", "zero_3"]),
            ("bf16-mixed", ["zero_2", "zero_1_offload", "zero_3_offload"]),
            ("32-true", [*STAGES, "zero_1_offload", *OFFLOADED]),
        ],
        0,
    ),
)
def test_a_step_without_a_gradient_does_not_take_an_old_one(precision: str, engines: list[str]) -> None:
    check_equal(engines, Sometimes, precision, trainer={"max_steps": 4})
