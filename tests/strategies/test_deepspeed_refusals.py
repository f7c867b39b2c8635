"""What can't work under DeepSpeed is refused before the first step, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_shard.callbacks import MemoryCallback, ThroughputCallback
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies import refusals
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


class DropsByModule(Manual):
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        optimizer: Any = super().optimizers(use_pl_optimizer)
        vars(optimizer)["zero_grad"] = self.zero_grad
        return optimizer


class StepsByAdagrad(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


ADAGRAD = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}


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
    (
        TinyLM,
        {"stage": 0},
        {},
        "stage is 0, which shards nothing and is the DDP engine here. Use strategy: shard_deepspeed_stage_0, or Shard",
    ),
    (TinyLM, {"config": {"zero_optimization": {"stage": 0}}}, {}, "stage is 0, which shards nothing and is the DDP"),
    (StepsByAdagrad, {"stage": 1}, {}, "Adagrad, in whose place DeepSpeed puts one of its own with default"),
    (WithoutOptimizer, {"config": ADAGRAD}, {}, "Use shard_fsdp or shard_ddp, or DeepSpeedCPUAdagrad with offload"),
    (
        TwoOptimizers,
        {"config": {"scheduler": {"type": "WarmupLR"}}},
        {},
        "a scheduler section, which does not say whose",
    ),
    (Lbfgs, {}, {}, "LBFGS couples parameters"),
    (Thaws, {}, {}, "frozen or thawed after the fit began"),
    (Thaws, {"stage": 1}, {"precision": "bf16-mixed"}, "frozen or thawed after the fit began"),
    (DropsGradients, {}, {}, "zero_grad was called between a backward pass and the optimizer's step"),
    (
        DropsGradients,
        {"aligned": True},
        {},
        "the optimizer's step runs DropsGradients.on_after_backward, but",
    ),
    *((Keeps, {"stage": stage}, {}, "zero_grad of AdamW was not called since its last step") for stage in (1, 2, 3)),
    (DropsByModule, {"stage": 1}, {}, "sees neither module.zero_grad() nor parameter.grad = None. Call"),
    (WithoutOptimizer, {}, {}, "the DeepSpeed configuration has no optimizer section"),
    (
        TinyLM,
        {"mesh": MeshConfig(replicate=2)},
        {},
        "mesh asks for 2 replicas, but DeepSpeed shards over all processes",
    ),
    (TinyLM, {"stage": 3, "accumulate_sync": "boundary"}, {}, "ZeRO stage 3 reduces accumulated gradients after each"),
    (TinyLM, {"stage": 2, "config": {"gradient_clipping": 1.0}}, {}, "gradient_clipping is 1, but the Trainer's"),
]


def warned(kind: type[TinyLM], **settings: Any) -> list[str]:
    """What is said of gradients as a fit begins."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy=ShardDeepSpeedStrategy(**settings), max_steps=1, callbacks=[Inspects()]).fit(
            kind(), loader()
        )
    return [str(each.message) for each in caught if "Between backward" in str(each.message)]


class Inspects(pl.Callback):
    """Overrides a hook ahead of backward, and reads the gradient of a tensor that is no parameter."""

    def on_before_zero_grad(self, *_: Any) -> None:
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        assert x.grad is not None


class Commented(TinyLM):
    def on_after_backward(self) -> None:
        """Where p.grad *= 0.5 stands in a text."""


class Untouched(MemoryCallback):
    """Its hooks are this package's own."""


@pytest.mark.parametrize("aligned", [False, True])
def test_hooks_that_are_not_between_and_those_that_use_the_accessor_run(aligned: bool) -> None:
    assert run_distributed(warned, 1, TinyLM, aligned=aligned) == [[]]
    assert run_distributed(warned, 1, Commented, aligned=aligned, hooks_use_accessor=True) == [[]]
    [[said]] = run_distributed(warned, 1, Manual, aligned=aligned)
    assert "step runs Manual.training_step, which steps by hand, but under ShardDeepSpeedStrategy .grad" in said


def test_hooks_between_are_warned_of_under_plain_names() -> None:
    [[said]] = run_distributed(warned, 1, Commented)
    assert "step runs Commented.on_after_backward, but under ShardDeepSpeedStrategy .grad of a parameter is not" in said
    assert 'full_parameters(trainer, kind="gradient") or full_tensor' in said
    assert "set hooks_use_accessor: true (examples/guides/contract.md)" in said


@pytest.mark.parametrize(
    ("owner", "hook", "users"),
    [
        (Commented(), "on_after_backward", True),
        (Commented(), "on_before_optimizer_step", False),
        (LambdaCallback(on_after_backward=lambda *_: None), "on_after_backward", True),
        (LambdaCallback(), "on_after_backward", False),
        (Untouched(), "on_before_optimizer_step", False),
        (ThroughputCallback(), "on_after_backward", False),
    ],
)
def test_whose_hook_it_is(owner: Any, hook: str, users: bool) -> None:
    assert refusals._is_users(hook, owner) == users


def section(kind: str, name: str = "optimizer", **params: Any) -> dict[str, Any]:
    return {"config": {name: {"type": kind, "params": params}}}


UNKNOWN: list[tuple[type[TinyLM], dict[str, Any], str]] = [
    (WithoutOptimizer, section("AdamW", lr=0.1, momentum=0.9), "FusedAdam takes lr, bias_correction, betas, eps, adam"),
    (WithoutOptimizer, section("AdamW", lr=0.1, torch_adam=True, rho=1), "AdamW takes lr, betas, eps, weight_decay"),
    (WithoutOptimizer, section("SGD", lr=0.1, betas=[0.9, 0.99]), "unexpected keyword argument 'betas'"),
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


@pytest.mark.matrix
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
        assert "was sharded by ZeRO-3" in run_distributed(go_on_elsewhere, 2, zero_3, then)[0]
    for then in (zero_3, zero_2):
        assert "was sharded with FSDP2" in run_distributed(go_on_elsewhere, 2, fsdp, then)[0]
