"""Units that torch.compile compiles, and modules that users compile by themselves: whole graphs, the same names."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shard import (
    ConfigurationError,
    ShardDDPStrategy,
    ShardDeepSpeedStrategy,
    ShardFSDPStrategy,
    WrappingError,
)
from lightning_shard.callbacks.memory_report import MemoryCallback
from lightning_shard.engines.units import UnitRule, find_units
from lightning_shard.tensors.names import fqns, named_parameters
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, all_parameters, loader, quiet_trainer, whole_parameters
from tests.strategies.engines import differences
from tests.strategies.test_sharding import fit


class _Attention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        heads = super().forward(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Attends(TinyLM):
    """Has attention, which torch takes for random: where it runs again in backward, the compiler restores a state."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            if not isinstance(block.down, _Attention):
                block.down = _Attention(block.down.in_features, block.down.out_features)


def _compiled(checkpointing: Any, **settings: Any) -> TinyLM:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    strategy = ShardFSDPStrategy(aligned=True, compile=True, activation_checkpointing=checkpointing)
    # The callback's hooks are there in the first step alone.
    found = fit(strategy, callbacks=[MemoryCallback()], **{"kind": TinyLM, **settings})
    # One for all blocks, casts and checkpoints in it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    return found


def _check_compiled() -> None:
    # Without dropout, whose numbers the compiler draws otherwise.
    still: dict[str, Any] = {"model": {"dropout": 0.0}}
    expected = fit(ShardFSDPStrategy(), kind=TinyLM, **still)
    found = _compiled(None, **still)
    # The compiler fuses and so rounds differently: a few spacings of fp32 in losses of about 4.
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    for name, parameter in whole_parameters(expected).items():
        # AdamW's first steps have the size of the learning rate, 1e-2, whatever the gradient's.
        torch.testing.assert_close(whole_parameters(found)[name], parameter, rtol=0, atol=1e-4)
    assert list(found.state_dict()) == list(expected.state_dict())

    expected = fit(ShardFSDPStrategy(), kind=TinyLM, precision="bf16-mixed", **still)
    found = _compiled("selective", precision="bf16-mixed", **still)
    # What is fused is rounded to bf16 less often: a spacing of bf16, 2^-8.
    torch.testing.assert_close(found.losses, expected.losses, rtol=2**-8, atol=0)
    assert all(map(math.isfinite, _compiled("units", kind=Attends, precision="bf16-mixed").losses))


@pytest.mark.matrix
def test_compiled_units() -> None:
    run_distributed(_check_compiled, 2, timeout=300)


def _check_graphs(strategy: Any, stage: int | None, checkpointing: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings: dict[str, Any] = {"compile": True, "activation_checkpointing": checkpointing}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        trainer = quiet_trainer(strategy=strategy(**settings, **({"stage": stage} if stage else {})), max_epochs=2)
        trainer.fit(TinyLM(), loader(count=32), loader(count=32, shuffle=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # for training and for validation
    assert not torch._dynamo.utils.counters["graph_break"]


KINDS = [
    (ShardFSDPStrategy, None, None),
    (ShardFSDPStrategy, None, "selective"),
    (ShardDeepSpeedStrategy, 2, None),
    (ShardDDPStrategy, None, None),
]


@pytest.mark.parametrize(("strategy", "stage", "checkpointing"), sampled(KINDS, 0))
def test_all_steps_run_two_graphs(strategy: Any, stage: int | None, checkpointing: Any) -> None:
    run_distributed(_check_graphs, 2, strategy, stage, checkpointing)


WEIGHT = "net.0.weight"


class Compiled(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), backend="eager")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.arange(6.0).add(sample).sin() for sample in range(12)], batch_size=2)  # type: ignore[arg-type] # a list is a data set

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        quiet_trainer(strategy="shard_deepspeed_stage_3", max_steps=1).fit(Compiled())
    return str(error.value)


def test_stage_3_refuses_them_before_it_shards() -> None:
    assert run_distributed(_refused, 1)[0].startswith("torch.compile makes a graph of net, but ShardDeepSpeedStrategy")


class Blocks(pl.LightningModule):
    """Blocks that ``how`` compiles, or the module around them."""

    def __init__(self, how: str, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        owner, names = (self, ["net"]) if whole else (self.net, ["0", "1", "2"])
        for name in names:
            part = owner.get_submodule(name)
            if how == "module":
                setattr(owner, name, torch.compile(part, backend="eager"))
            elif how == "in place":
                part.compile(backend="eager")
            else:
                part.forward = torch.compile(part.forward, backend="eager")  # type: ignore[method-assign]

    training_step, configure_optimizers = Compiled.training_step, Compiled.configure_optimizers
    train_dataloader = val_dataloader = Compiled.train_dataloader

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


def _own_graphs(name: str, how: str, whole: bool, precision: str) -> tuple[int, int, dict[str, Tensor]]:
    """The graphs and graph breaks of a fit with validation, and its weights."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = Blocks(how, whole)
    trainer = quiet_trainer(strategy=name, precision=precision, max_epochs=2)
    trainer.fit(module)
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], counted["graph_break"].total(), all_parameters(trainer)


def _check_own_graphs(how: str, whole: bool, precision: str) -> None:
    graphs, breaks, wanted = _own_graphs("shard_ddp", how, whole, precision)
    found = _own_graphs("shard_fsdp", how, whole, precision)
    assert found[:2] == (graphs, breaks) == (2 if whole else 3, 0)
    assert differences(wanted, found[2]) == {}


CASES = [("module", True, "32-true"), ("in place", False, "32-true"), ("forward", False, "bf16-mixed")]


@pytest.mark.parametrize(("how", "whole", "precision"), sampled(CASES, 0))
def test_no_hook_breaks_a_graph_under_fsdp(how: str, whole: bool, precision: str) -> None:
    run_distributed(_check_own_graphs, 2, how, whole, precision)


def test_a_unit_is_around_a_graph() -> None:
    module = Blocks("module", whole=True)
    assert [unit.name for unit in find_units(module, "auto")] == ["net"]
    assert [unit.name for unit in find_units(Blocks("forward", whole=False), "auto")] == ["net.0", "net.1", "net.2"]
    assert find_units(Blocks("in place", whole=True), "auto") == []
    with pytest.raises(WrappingError, match=r"net\._orig_mod\.1 settings of its own, but it is inside a graph"):
        find_units(module, [UnitRule(pattern=r"net\._orig_mod\.1", compute="fp32")])


def test_a_name_is_found_by_both_spellings() -> None:
    module = Compiled()
    assert list(named_parameters(module)) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    names = fqns(module)
    assert names.canonical("net._orig_mod.0.weight") == names.canonical(WEIGHT) == WEIGHT
    with pytest.raises(ConfigurationError, match=r"no parameter 'net._orig_mod.1.weight'"):
        names.canonical("net._orig_mod.1.weight")
