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


def fitted(engine: str, precision: str, **settings: Any) -> tuple[Hooked, pl.Trainer, dict[str, Tensor]]:
    pl.seed_everything(1, verbose=False)
    module, masters = Hooked(), Masters()
    strategy = ENGINES[engine](aligned=True, **settings)
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=2, callbacks=[masters])
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


PLAIN = ["ddp", "full", "zero_2", "zero_3"]


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("32-true", marks=pytest.mark.matrix)])
def test_a_fitted_module_becomes_plain(precision: str) -> None:
    run_distributed(use, 2, PLAIN, precision)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_fitted_module_becomes_plain_elsewhere(ranks: int) -> None:
    run_distributed(use, ranks, ["ddp", "grad_op", "offload", "zero_1", "zero_3_offload"], "bf16-mixed")


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


@pytest.mark.parametrize("engine", ["full", "zero_3"])
def test_a_sharded_module_is_for_runs_alone(engine: str) -> None:
    run_distributed(refused_after_the_fit, 2, engine)


def use_at_once(engines: list[str], precision: str) -> None:
    for engine in engines:
        module, trainer, masters = fitted(engine, precision, unshard_after_fit=True, activation_checkpointing="units")
        check_plain(module, masters)
        trainer.save_checkpoint(f"{engine}.ckpt", weights_only=True)
        saved = load_from_checkpoint(Hooked, f"{engine}.ckpt")
        assert differences(masters, dict(saved.named_parameters())) == {}


def test_a_fit_ends_with_a_plain_module() -> None:
    run_distributed(use_at_once, 2, PLAIN, "bf16-mixed")


def on_rank_0(engine: str) -> tuple[str, str]:
    module, _, masters = fitted(engine, "bf16-mixed")
    unshard(module, rank0_only=True)
    if torch.distributed.get_rank() == 0:
        check_plain(module, masters)
    (device,) = {p.device.type for p in module.parameters()}
    return type(module).__name__, device


@pytest.mark.parametrize("engine", ["full", "zero_3"])
def test_the_parameters_are_left_to_rank_0(engine: str) -> None:
    assert run_distributed(on_rank_0, 2, engine) == [("Hooked", "cpu"), ("Hooked", "meta")]


class InRun(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.told = refusal(unshard, module)


def in_run() -> Any:
    callback = InRun()
    quiet_trainer(strategy=ENGINES["full"](aligned=True), max_steps=1, callbacks=[callback]).fit(Taught(), loader())
    return callback.told


def test_a_run_that_goes_on_is_refused() -> None:
    for kind, text in run_distributed(in_run, 2):
        assert kind == "ConfigurationError"
        assert text.startswith("unshard is called in a run, which goes on with the shards: call it after fit")


def part_of_it(engine: str) -> tuple[str, str]:
    module, _, _ = fitted(engine, "bf16-mixed")
    kind, text = refusal(unshard, module.student)
    return kind or type(module.student).__name__, text


def test_a_part_of_what_was_fitted() -> None:
    assert {*run_distributed(part_of_it, 2, "full")} == {("Net", "")}
    for kind, text in run_distributed(part_of_it, 2, "zero_3"):
        assert kind == "ConfigurationError"
        assert text.startswith("the LightningModule has the masters of parameters that stage 3 has sharded")
