"""A plain module after a fit: its own class and full parameters, for use without an engine."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import full_parameters, load_from_checkpoint, unshard
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import all_parameters, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.indexed import refusal
from tests.strategies.taught import Taught

TOKENS = torch.arange(8).view(1, 8)


class Hooked(Taught):
    """A module with a forward of its own instance and a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        own = self.student.body[0].forward
        self.student.body[0].forward = lambda x: own(x) * 1.0
        self.calls = 0
        self.student.register_forward_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.calls += 1

    def forward(self, tokens: Tensor) -> Tensor:
        return self.student(tokens)


class Masters(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.parameters = all_parameters(trainer)


class InRun(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.told = refusal(unshard, module)


def fitted(
    engine: str, precision: str, callback: pl.Callback | None = None, **settings: Any
) -> tuple[Hooked, pl.Trainer, dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    module, masters = Hooked(), Masters()
    strategy = ENGINES[engine](aligned=True, **settings)
    callbacks = [masters, *([callback] if callback else [])]
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=2, callbacks=callbacks)
    trainer.fit(module, loader())
    return module, trainer, masters.parameters


def check_plain(module: Hooked, masters: dict[str, Tensor]) -> Tensor:
    """As a module that was fitted by no engine; returns its output."""
    fresh = Hooked()
    for (name, own), plain in zip(module.named_modules(), fresh.modules(), strict=True):
        assert type(own) is type(plain), name
        assert type(vars(own)["_parameters"]) is dict
        assert {*vars(own)} - {*vars(plain)} <= {"_hparams"}, name
        for hooks, value in vars(plain).items():
            if hooks.endswith("_hooks"):
                assert len(vars(own)[hooks] or {}) == len(value or {}), (name, hooks)
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert vars(parameter) == {}
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in fresh.parameters()]
    assert module.student.out.weight is module.student.embed.weight
    assert differences(masters, dict(module.named_parameters())) == {}
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    calls = module.calls
    with torch.no_grad():
        output = module(TOKENS)
        assert torch.equal(output, fresh(TOKENS))
    assert module.calls == calls + 1
    assert torch.equal(copy.deepcopy(module)(TOKENS), output)
    return output


def use(engines: list[str], precision: str) -> None:
    for engine in engines:
        module, _, masters = fitted(engine, precision)
        assert refusal(unshard, module) == ("", "")
        check_plain(module, masters)
        assert unshard(module) is module
        check_plain(module, masters)
        # Another Trainer shards it once more, or leaves it as it is.
        again = quiet_trainer(strategy=ENGINES["full"](aligned=True), max_steps=1)
        again.fit(module, loader())
        check_plain(unshard(module), all_parameters(again))


@pytest.mark.parametrize(
    ("ranks", "engines", "precision"),
    sampled(
        [
            (2, ["full", "zero_3"], "bf16-mixed"),
            (2, ["ddp", "full", "zero_2", "zero_3"], "32-true"),
            (3, ["ddp", "grad_op", "offload", "zero_1", "zero_3_offload"], "bf16-mixed"),
        ],
        0,
    ),
)
def test_a_fitted_module_becomes_plain(ranks: int, engines: list[str], precision: str) -> None:
    run_distributed(use, ranks, engines, precision)


def refused_after_the_fit(engine: str) -> None:
    module, trainer, masters = fitted(engine, "bf16-mixed")
    trainer.save_checkpoint("after.ckpt")
    for use in (lambda: module(TOKENS), module.state_dict, module.student.state_dict):
        kind, text = refusal(use)
        assert kind == "ConfigurationError"
        assert "outside of a run" in text
        assert "lightning_shard.unshard(module)" in text
    with full_parameters(trainer) as tensors:
        assert differences(masters, dict(tensors)) == {}
    trainer.validate(module, loader(), verbose=False)
    # A stock Trainer.
    stock = pl.Trainer(accelerator="cpu", devices=1, strategy="auto", max_steps=1, logger=False, barebones=True)
    kind, text = refusal(stock.fit, module, loader())
    assert (kind, "lightning_shard.unshard(module)" in text) == ("ConfigurationError", True), text
    assert refusal(module.state_dict)[0] == "ConfigurationError"


@pytest.mark.parametrize("engine", sampled(["full", "zero_3"], 0))
def test_a_sharded_module_is_for_runs_alone(engine: str) -> None:
    run_distributed(refused_after_the_fit, 2, engine)


def use_at_once(engines: list[str]) -> None:
    for engine in engines:
        settings: dict[str, Any] = {"unshard_after_fit": True, "activation_checkpointing": "units"}
        module, trainer, masters = fitted(engine, "bf16-mixed", **settings)
        check_plain(module, masters)
        trainer.save_checkpoint(f"{engine}.ckpt", weights_only=True)
        saved = load_from_checkpoint(Hooked, f"{engine}.ckpt")
        assert differences(masters, dict(saved.named_parameters())) == {}


def test_a_fit_ends_with_a_plain_module() -> None:
    run_distributed(use_at_once, 2, ["full", "zero_2"])


def on_rank_0(engine: str) -> tuple[str, str]:
    module, _, masters = fitted(engine, "bf16-mixed")
    unshard(module, rank0_only=True)
    if torch.distributed.get_rank() == 0:
        check_plain(module, masters)
    (device,) = {p.device.type for p in module.parameters()}
    return type(module).__name__, device


@pytest.mark.parametrize("engine", sampled(["full", "zero_3"], 0))
def test_the_parameters_are_left_to_rank_0(engine: str) -> None:
    assert run_distributed(on_rank_0, 2, engine) == [("Hooked", "cpu"), ("Hooked", "meta")]


def in_run_and_part(engine: str) -> list[tuple[str, str]]:
    """Answers to `unshard` in a run, and to `unshard` of a part of a fitted module."""
    module, _, _ = fitted(engine, "bf16-mixed", callback=(callback := InRun()))
    return [callback.told, refusal(unshard, module.student)]


def test_a_run_that_goes_on_and_a_part_under_stage_3_are_refused() -> None:
    for in_run, part in run_distributed(in_run_and_part, 2, "zero_3"):
        assert in_run[0] == part[0] == "ConfigurationError"
        assert in_run[1].startswith("unshard is called in a run, which goes on with the shards: call it after fit")
        assert part[1].startswith("the LightningModule has the masters of parameters that stage 3 has sharded")
    assert [part for _, part in run_distributed(in_run_and_part, 2, "full")] == [("", "")] * 2
