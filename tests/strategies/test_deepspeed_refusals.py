"""Settings and modules that can't work under DeepSpeed are refused, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_shard.callbacks import MemoryCallback, ThroughputCallback
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES
from tests.strategies.zero import Keeps, Manual, WithoutOptimizer


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
WARMUP = {"scheduler": {"type": "WarmupLR"}}


class Lbfgs(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSALS: list[tuple[type[TinyLM], dict[str, Any], dict[str, Any], str]] = [
    (
        TinyLM,
        {"stage": 0},
        {},
        "stage is 0, which shards nothing and is the DDP engine here. Use strategy: shard_deepspeed_stage_0, or Shard",
    ),
    (StepsByAdagrad, {"stage": 1}, {}, "Adagrad, in whose place DeepSpeed puts one of its own with default"),
    (WithoutOptimizer, {"config": ADAGRAD}, {}, "Use shard_fsdp or shard_ddp, or DeepSpeedCPUAdagrad with offload"),
    (TwoOptimizers, {"config": WARMUP}, {}, "a scheduler section, which does not say whose"),
    (Lbfgs, {}, {}, "LBFGS couples parameters"),
    (Thaws, {"stage": 1}, {"precision": "bf16-mixed"}, "frozen or thawed after the fit began"),
    (DropsGradients, {}, {}, "zero_grad was called between a backward pass and the optimizer's step"),
    (
        DropsGradients,
        {"aligned": True},
        {},
        "the optimizer's step runs DropsGradients.on_after_backward, but",
    ),
    *((Keeps, {"stage": stage}, {}, "zero_grad of AdamW was not called since its last step") for stage in (1, 3)),
    (DropsByModule, {"stage": 1}, {}, "sees neither module.zero_grad() nor parameter.grad = None. Call"),
    (WithoutOptimizer, {}, {}, "the DeepSpeed configuration has no optimizer section"),
    (
        TinyLM,
        {"mesh": MeshConfig(replicate=2)},
        {},
        "mesh asks for 2 replicas, but DeepSpeed shards over all processes",
    ),
    (TinyLM, {"stage": 3, "accumulate_sync": "boundary"}, {}, "ZeRO stage 3 reduces accumulated gradients after each"),
    (TinyLM, {"stage": 2, "config": {"gradient_clipping": 1.0}}, {}, "gradient_clipping is 1.0, but the Trainer's"),
    (TinyLM, {"config": WARMUP}, {}, "returns the schedule LambdaLR, and the DeepSpeed configuration has the"),
]


class Inspects(pl.Callback):
    """Overrides a hook ahead of backward, and reads the gradient of a tensor that is no parameter."""

    def on_before_zero_grad(self, *_: Any) -> None:
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        assert x.grad is not None


class Commented(TinyLM):
    def on_after_backward(self) -> None:
        """Where p.grad *= 0.5 stands in a text."""


def _warned(kind: type[TinyLM], **settings: Any) -> str:
    """The warning of gradients as a fit begins, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = ShardDeepSpeedStrategy(**settings)
        # Of these none has hooks of a user's that see gradients.
        callbacks = [Inspects(), LambdaCallback(), MemoryCallback(), ThroughputCallback()]
        quiet_trainer(strategy=strategy, max_steps=1, callbacks=callbacks).fit(kind(), loader())
    return "".join(str(each.message) for each in caught if "Between backward" in str(each.message))


def _warn_of_hooks() -> None:
    for aligned in (False, True):
        assert _warned(Commented, aligned=aligned, hooks_use_accessor=True) == ""
        said = _warned(Manual, aligned=aligned)
        assert "step runs Manual.training_step, which steps by hand, but under ShardDeepSpeedStrategy .grad" in said
    assert _warned(TinyLM, aligned=True) == ""
    said = _warned(Commented)
    assert "step runs Commented.on_after_backward, but under ShardDeepSpeedStrategy .grad of a parameter is not" in said
    assert 'full_parameters(trainer, kind="gradient") or full_tensor' in said
    assert "set hooks_use_accessor: true (examples/guides/contract.md)" in said


def test_hooks_between_are_warned_of_unless_they_use_the_accessor() -> None:
    run_distributed(_warn_of_hooks, 1)


def _fit(kind: type[TinyLM], settings: dict[str, Any], trainer: dict[str, Any]) -> None:
    strategy = ShardDeepSpeedStrategy(**settings)
    quiet_trainer(strategy=strategy, **{"max_steps": 2, **trainer}).fit(kind(), loader())


def _refuse_all() -> None:
    for kind, settings, trainer, message in REFUSALS:
        with pytest.raises(ConfigurationError) as caught:
            _fit(kind, settings, trainer)
        assert message in str(caught.value)


def test_settings_that_can_not_work_are_refused() -> None:
    run_distributed(_refuse_all, 2)


def _go_on_elsewhere() -> None:
    for first, others, name in (
        ("zero_3", ("full", "ddp", "zero_2"), "by ZeRO-3"),
        ("full", ("zero_3",), "with FSDP2"),
    ):
        module = TinyLM()
        quiet_trainer(strategy=ENGINES[first](), max_steps=1).fit(module, loader())
        for other in others:
            with pytest.raises(ConfigurationError, match=f"was sharded {name}"):
                quiet_trainer(strategy=ENGINES[other](), max_steps=1).fit(module, loader())


def test_a_module_that_another_engine_sharded_is_refused() -> None:
    run_distributed(_go_on_elsewhere, 2)
