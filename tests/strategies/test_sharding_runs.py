"""Several Trainers one after the other on one sharded module, and evaluation, which is never in inference mode."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops import utilities
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard import MeshConfig, ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.errors import ConfigurationError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters
from tests.strategies.regression import compare

# Several runs of one module.


def run(module: TinyLM, strategy: Any, *, steps: int = 3, precision: str = "32-true") -> None:
    pl.seed_everything(1, verbose=False)
    quiet_trainer(strategy=strategy, max_steps=steps, precision=precision).fit(module, loader())


def _check_fit_twice() -> None:
    twice = []
    for strategy in (ShardDDPStrategy, ShardFSDPStrategy):
        module = TinyLM(tie=True)
        module.configure_model()
        first = copy.deepcopy(module.state_dict())
        for _ in range(2):
            run(module, strategy(aligned=True))
        twice.append(module)
        # And a fold that begins as the first did, from full values.
        module.load_state_dict({name: value for name, value in first.items() if not name.startswith("blocks.")}, False)
        module.blocks.load_state_dict({n[len("blocks.") :]: v for n, v in first.items() if n.startswith("blocks.")})
        run(module, strategy(aligned=True))
    assert len(twice[0].losses) == 9
    assert twice[0].losses[6:] == twice[0].losses[:3]
    assert twice[0].losses == twice[1].losses
    compare(twice[1], twice[0], "fit twice")


def _check_fit_then_evaluate(precision: str) -> None:
    metrics = []
    for strategy in (lambda: ShardDDPStrategy(aligned=True), lambda: ShardFSDPStrategy(aligned=True, units=["Block"])):
        module = TinyLM(dropout=0.5)
        trainer = quiet_trainer(strategy=strategy(), precision=precision)
        # First without a fit.
        found = [trainer.validate(module, loader(shuffle=False), verbose=False)[0]["val_loss"]]
        run(module, strategy(), precision=precision)
        before = whole_parameters(module)
        other = quiet_trainer(strategy=strategy(), precision=precision)
        found.append(other.validate(module, loader(shuffle=False), verbose=False)[0]["val_loss"])
        found.append(other.test(module, loader(shuffle=False), verbose=False)[0]["test_loss"])
        predictions = other.predict(module, loader(shuffle=False))
        assert predictions is not None
        metrics.append((found, torch.cat(predictions)))
        assert all(torch.equal(p, before[n]) for n, p in whole_parameters(module).items())
        # And training goes on from there.
        run(module, strategy(), precision=precision, steps=1)
        metrics[-1][0].extend(module.losses)
    (ddp, predicted), (fsdp, by_fsdp) = metrics
    assert ddp[0] != ddp[1] == ddp[2]
    assert ddp == fsdp
    assert torch.equal(predicted, by_fsdp)


def _check_foreign() -> None:
    module = TinyLM()
    run(module, ShardFSDPStrategy(), steps=1)
    before = whole_parameters(module)
    for strategy, precision in [
        (ShardFSDPStrategy(units=["Linear"]), "32-true"),
        (ShardFSDPStrategy(mesh=MeshConfig(replicate=2)), "32-true"),
        (ShardFSDPStrategy(), "bf16-mixed"),
        (ShardDDPStrategy(), "bf16-mixed"),
    ]:
        with pytest.raises(ConfigurationError, match=r"sharded by an earlier run.*ckpt_path"):
            run(module, strategy, precision=precision)
    with pytest.raises(ConfigurationError, match="ShardDDPStrategy needs a module with full parameters"):
        run(module, ShardDDPStrategy())
    assert all(torch.equal(p, before[n]) for n, p in whole_parameters(module).items())
    # What shards nothing stands in nobody's way.
    replicated = TinyLM()
    run(replicated, ShardDDPStrategy(), steps=1)
    run(replicated, ShardFSDPStrategy(), steps=1)
    assert all(isinstance(p, DTensor) for p in replicated.parameters())


def test_one_module_in_several_runs() -> None:
    run_distributed(_check_fit_twice, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.matrix), "bf16-mixed"])
def test_fit_then_evaluate_with_another_trainer(precision: str) -> None:
    run_distributed(_check_fit_then_evaluate, 2, precision)


def test_a_module_sharded_otherwise_is_refused() -> None:
    run_distributed(_check_foreign, 2)


# No step of an evaluation is in inference mode. Lightning uses it on every backend but gloo.


class SeesTheMode(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.modes: dict[str, bool] = {}

    def note(self, where: str) -> None:
        self.modes[where] = torch.is_inference_mode_enabled() or torch.is_grad_enabled()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("test")
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.note("predict")
        output = super().predict_step(batch, batch_idx)
        assert not output.is_inference()
        return output

    def on_validation_epoch_end(self) -> None:
        # Parameters that a hook uses between the steps are as good for the next training step.
        self.note("hook")
        self.generate(torch.zeros(1, 8, dtype=torch.int64))

    def generate(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)


class StockModule(SeesTheMode):
    """Runs under Lightning's own strategy, to show that the backend is disguised."""

    def on_validation_epoch_end(self) -> None:
        self.note("hook")


def _check_mode(strategy: str) -> None:
    real = utilities.dist
    utilities.dist = SimpleNamespace(get_backend=lambda: "nccl")  # type: ignore[assignment]
    try:
        stock = StockModule()
        quiet_trainer(strategy="ddp").validate(stock, loader(shuffle=False), verbose=False)
        assert stock.modes == {"validation": True, "hook": True}

        pl.seed_everything(1, verbose=False)
        module = SeesTheMode()
        trainer = quiet_trainer(strategy=strategy, max_steps=3, val_check_interval=1, limit_val_batches=2)
        trainer.fit(module, loader(), loader(shuffle=False))
        assert module.modes == {"validation": False, "hook": False}
        other = quiet_trainer(strategy=strategy, limit_test_batches=2, limit_predict_batches=2)
        other.validate(module, loader(shuffle=False), verbose=False)
        other.test(module, loader(shuffle=False), verbose=False)
        other.predict(module, loader(shuffle=False))
        assert module.modes == {"validation": False, "hook": True, "test": False, "predict": False}
        run(module, strategy, steps=2)  # type: ignore[arg-type]
    finally:
        utilities.dist = real
    plain = TinyLM()
    run(plain, strategy)
    assert module.losses[:3] == plain.losses
    if "fsdp" in strategy:
        assert isinstance(module, FSDPModule)


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op"], 1))
def test_steps_of_an_evaluation_are_never_in_inference_mode(strategy: str) -> None:
    run_distributed(_check_mode, 2, strategy)
