"""What can't work under DeepSpeed is refused before the first step, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES
from tests.strategies.zero import Keeps, Manual, WithoutOptimizer

# Refusals, on every rank alike


class TwoOptimizers(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters()), torch.optim.SGD(self.head.parameters())]


class Thaws(TinyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.embed.requires_grad_(batch_idx == 0)


class DropsGradients(TinyLM):
    def on_after_backward(self) -> None:
        self.trainer.optimizers[0].zero_grad()


class DropsByModule(TinyLM):
    def on_after_backward(self) -> None:
        self.head.zero_grad()


class ScalesLate(Manual):
    """Changes gradients from the tenth batch on."""

    def on_after_backward(self) -> None:
        if self.global_step >= 9:
            self.scale()

    def scale(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2


class WithoutSchedule(TinyLM):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class Lbfgs(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(kind: type[TinyLM], settings: dict[str, Any], trainer: dict[str, Any]) -> str:
    try:
        strategy = ShardDeepSpeedStrategy(**settings)
        quiet_trainer(strategy=strategy, **{"max_steps": 2, **trainer}).fit(kind(), loader())
    except ConfigurationError as error:
        return str(error)
    return "not refused"


REFUSALS: list[tuple[type[TinyLM], dict[str, Any], dict[str, Any], str]] = [
    (TwoOptimizers, {"stage": 0}, {}, "returns 2 optimizers, but DeepSpeed's engine steps one in stage 0"),
    (
        TwoOptimizers,
        {"config": {"scheduler": {"type": "WarmupLR"}}},
        {},
        "a scheduler section, which does not say whose",
    ),
    (Lbfgs, {}, {}, "LBFGS couples parameters"),
    (Lbfgs, {"stage": 0}, {}, "LBFGS needs a closure that computes the loss again, but DeepSpeed steps after backward"),
    (Thaws, {}, {}, "frozen or thawed after the fit began"),
    (Thaws, {"stage": 1}, {"precision": "bf16-mixed"}, "frozen or thawed after the fit began"),
    (DropsGradients, {}, {}, "was dropped (zero_grad, parameter.grad = None) between a backward pass and the"),
    (DropsByModule, {}, {}, "was dropped (zero_grad, parameter.grad = None) between a backward pass and the"),
    *((Keeps, {"stage": stage}, {}, "zero_grad was not called since the last step (of ") for stage in (1, 2, 3)),
    (
        ScalesLate,
        {"stage": 1},
        {"max_steps": 12},
        "uses .grad of shift, but under ShardDeepSpeedStrategy(stage=1)",
    ),
    (WithoutOptimizer, {}, {}, "the DeepSpeed configuration has no optimizer section"),
    (
        TinyLM,
        {"mesh": MeshConfig(replicate=2)},
        {},
        "mesh asks for 2 replicas, but DeepSpeed shards over all processes",
    ),
    (TinyLM, {"stage": 0, "aligned": True}, {"precision": "bf16-mixed"}, "shard_ddp_aligned"),
    (TinyLM, {"stage": 0}, {"precision": "bf16-mixed"}, "shard_ddp"),
    (TinyLM, {"stage": 3, "accumulate_sync": "boundary"}, {}, "ZeRO stage 3 reduces accumulated gradients after each"),
    (TinyLM, {"stage": 2, "config": {"gradient_clipping": 1.0}}, {}, "gradient_clipping is 1, but the Trainer's"),
]


def section(kind: str, name: str = "optimizer", **params: Any) -> dict[str, Any]:
    return {"config": {name: {"type": kind, "params": params}}}


UNKNOWN: list[tuple[type[TinyLM], dict[str, Any], str]] = [
    (WithoutOptimizer, section("AdamW", lr=0.1, momentum=0.9), "FusedAdam takes lr, bias_correction, betas, eps, adam"),
    (WithoutOptimizer, section("AdamW", lr=0.1, torch_adam=True, rho=1), "AdamW takes lr, betas, eps, weight_decay"),
    (WithoutOptimizer, section("SGD", lr=0.1, betas=[0.9, 0.99]), "unexpected keyword argument 'betas'"),
    (WithoutOptimizer, section("Adagrad", lr=0.1, rho=1), "Adagrad takes lr, lr_decay, weight_decay"),
    (WithoutOptimizer, section("MuAdam", lr=0.1), "needs the package mup: pip install mup"),
    (
        WithoutSchedule,
        section("WarmupLR", "scheduler", warmup=3),
        "scheduler.params of WarmupLR is {'warmup': 3}, but WarmupLR",
    ),
    (
        WithoutSchedule,
        section("StepLR", "scheduler"),
        "takes step_size, gamma, last_epoch: StepLR.__init__() missing",
    ),
    (WithoutSchedule, section("CosineAnnealingLR", "scheduler", T_max=0), "modulo by zero. Correct it, or leave it to"),
    (WithoutSchedule, section("ReduceLROnPlateau", "scheduler"), "required positional argument: 'metrics'. Correct it"),
    (
        TinyLM,
        section("WarmupLR", "scheduler"),
        "returns the schedule LambdaLR, and the DeepSpeed configuration has the",
    ),
    (TinyLM, {"config": {"gradient_allreduce_op": "max"}}, "DeepSpeed refuses the configuration: Invalid gradient_all"),
]


def refused_untouched(cases: list[tuple[type[TinyLM], dict[str, Any], str]]) -> list[str]:
    said = []
    for kind, settings, _ in cases:
        module = kind()
        try:
            quiet_trainer(strategy=ShardDeepSpeedStrategy(stage=3, **settings), max_steps=2).fit(module, loader())
        except ConfigurationError as error:
            assert not any(hasattr(parameter, "ds_tensor") for parameter in module.parameters())
            said.append(str(error))
    return said


def test_what_an_optimizer_or_a_schedule_lacks_is_refused_before_stage_3_shards() -> None:
    for said in run_distributed(refused_untouched, 2, UNKNOWN):
        assert [case[2] for case, text in zip(UNKNOWN, said, strict=True) if case[2] not in text] == []


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[3][:30])
def test_what_can_not_work_is_refused(case: tuple[type[TinyLM], dict[str, Any], dict[str, Any], str]) -> None:
    kind, settings, trainer, message = case
    for said in run_distributed(refused, 2, kind, settings, trainer):
        assert message in said


def go_on_elsewhere(first: Callable[..., Any], then: Callable[..., Any]) -> str:
    module = TinyLM()
    quiet_trainer(strategy=first(), max_steps=1).fit(module, loader())
    try:
        quiet_trainer(strategy=then(), max_steps=1).fit(module, loader())
    except ConfigurationError as error:
        return str(error)
    return "not refused"


def test_a_module_that_another_engine_cut_is_refused() -> None:
    zero_3, zero_2, fsdp, ddp = (ENGINES[name] for name in ("zero_3", "zero_2", "full", "ddp"))
    for then in (fsdp, ddp, zero_2):
        assert "were sharded by ZeRO-3" in run_distributed(go_on_elsewhere, 2, zero_3, then)[0]
    for then in (zero_3, zero_2):
        assert "was sharded with FSDP2" in run_distributed(go_on_elsewhere, 2, fsdp, then)[0]
