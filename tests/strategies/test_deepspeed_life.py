"""A run under DeepSpeed from start to end: fit, validate, and the next run in the same process."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional

from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from lightning_shard.strategies.precision import ShardPrecision
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.zero import OFFLOADED, STAGES, Start, WithoutOptimizer, fit


def live(engine: str, precision: str) -> dict[str, Any]:
    """Fit, validate, test, predict uneven numbers of batches, and fit again with another Trainer."""
    pl.seed_everything(1, verbose=False)
    module, first, start, second = TinyLM(), Final(), Start(), Final()
    data = loader(count=36, shuffle=False)

    def trainer(**flags: Any) -> pl.Trainer:
        return quiet_trainer(strategy=ENGINES[engine](aligned=True), plugins=[ShardPrecision(precision)], **flags)

    loop = trainer(max_steps=4, val_check_interval=4, callbacks=[first])
    loop.fit(module, loader(), data)
    result = {
        "fitted": loop.callback_metrics["val_loss"].item(),
        "validated": loop.validate(module, data, verbose=False)[0]["val_loss"],
        "tested": loop.test(module, data, verbose=False)[0]["test_loss"],
        "predicted": [part.tolist() for part in loop.predict(module, data)],
    }
    trainer(max_steps=3, callbacks=[start, second]).fit(module, loader())
    assert differences(first.parameters, start.parameters) == {}
    return {**result, "parameters": second.parameters, "losses": module.losses}


def live_all(engines: list[str], precision: str) -> dict[str, Any]:
    linear, embedding = functional.linear, functional.embedding
    found = {}
    for engine in engines:
        found[engine] = live(engine, precision)
        assert (functional.linear, functional.embedding) == (linear, embedding)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "16-true"])
def test_a_whole_life_is_that_of_fsdp(precision: str) -> None:
    for rank in run_distributed(live_all, 2, ["full", *STAGES, *OFFLOADED], precision, timeout=300):
        expected = rank.pop("full")
        for engine, run in rank.items():
            assert differences(run.pop("parameters"), expected["parameters"]) == {}, engine
            assert run == {key: value for key, value in expected.items() if key != "parameters"}, engine


def _plain_then_aligned() -> None:
    """DeepSpeed replaces ``torch.nn.functional.linear`` and keeps its autocast on, if it is told so."""
    linear = functional.linear
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(functional.linear)

    for asked in ({}, {"memory_efficient_linear": True}):
        strategy = ShardDeepSpeedStrategy(stage=3, config={"zero_optimization": asked})
        quiet_trainer(strategy=strategy, max_steps=1, callbacks=[Look()]).fit(TinyLM(), loader())
    assert [each is linear for each in seen] == [True, False]
    assert functional.linear is linear
    module, config = TinyLM(), {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    trainer = quiet_trainer(strategy=ShardDeepSpeedStrategy(stage=2, config=config), max_steps=1)
    trainer.fit(module, loader())
    assert trainer.strategy.ledger.reduced_in == {torch.bfloat16, torch.float32}
    assert fit("zero_2", TinyLM, "bf16-mixed", {}, {"max_steps": 1})["reductions"] == {torch.float32}
    assert not [name for name, parameter in module.named_parameters() if hasattr(parameter, "comm_dtype")]


@pytest.mark.matrix
def test_a_plain_fit_leaves_the_process_as_it_was() -> None:
    run_distributed(_plain_then_aligned, 2)


SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}


# Schedules, and the rates of five steps: DeepSpeed's warm-up goes by the logarithm of the number of steps done.
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": "auto"}}
COSINE = {"type": "CosineAnnealingLR", "params": {"T_max": 4}}
RATES = {
    "WarmupLR": [0.0, 0.0, 1e-2 * math.log(2) / math.log(3), 1e-2, 1e-2],
    "CosineAnnealingLR": [5e-3 * (1 + math.cos(math.pi * step / 4)) for step in range(5)],
}


class Rates(pl.Callback):
    """Keeps the learning rate and betas of each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], *group["betas"]))


def _described() -> None:
    for stage, schedule in ((1, COSINE), (2, WARMUP), (3, COSINE)):
        module, rates = WithoutOptimizer(), Rates()
        config = {**SECTIONS, "scheduler": schedule}
        strategy = ShardDeepSpeedStrategy(stage=stage, aligned=True, config=config, hooks_use_accessor=True)
        quiet_trainer(strategy=strategy, max_steps=5, accumulate_grad_batches=2, callbacks=[rates]).fit(
            module, loader()
        )
        assert len(module.losses) == 10
        assert [rate for rate, *_ in rates.seen] == pytest.approx(RATES[schedule["type"]])
        made = strategy.deepspeed_config
        assert (made["train_micro_batch_size_per_gpu"], made["train_batch_size"]) == (4, 16)
        assert made["gradient_accumulation_steps"] == 2


@pytest.mark.matrix
def test_optimizer_and_schedule_of_the_configuration() -> None:
    run_distributed(_described, 2)
