"""Modules that users compile by themselves: whole graphs, names without a trace of it, and a sentence for stage 3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError, WrappingError, full_tensor, set_full_tensor
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.engines.module_checks import refuse_compiled
from lightning_shard.engines.units import UnitRule, find_units
from lightning_shard.registry import build
from lightning_shard.tensors.names import fqns, named_parameters
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import all_parameters, quiet_trainer
from tests.strategies.engines import differences

WEIGHT = "net.0.weight"


class Compiled(pl.LightningModule):
    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make, self.found = make, dict[str, Tensor | None]()
        self.net = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), backend="eager")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.arange(6.0).add(sample).sin() for sample in range(12)], batch_size=2)  # type: ignore[arg-type] # a list is a data set

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters(), lr=1e-2)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.found["gradient"] = full_tensor(self.trainer, WEIGHT, "gradient")

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        weight = full_tensor(self.trainer, WEIGHT)
        assert weight is not None
        set_full_tensor(self.trainer, "net._orig_mod.0.weight", weight * 0.9)


def _found(name: str, make: Callable[..., Optimizer], slot: str, folder: Path) -> dict[str, Tensor | None]:
    module = Compiled(make)
    strategy = build(name, hooks_use_accessor=True)
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=3)
    trainer.fit(module)
    path = folder / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    saved = {key: entry.read() for key, entry in open_any(path).tensors.items()}
    assert saved.keys() > {f"model.{WEIGHT}", f"optimizer.0.{WEIGHT}.{slot}"}
    return {**module.found, **saved}


def _differences(names: list[str], make: Callable[..., Optimizer], slot: str, folder: Path) -> list[str]:
    wanted = _found("shard_ddp_aligned", make, slot, folder)
    different = []
    for name in names:
        found = _found(name, make, slot, folder)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert value is not None
            if not torch.equal(value, found[key]):  # type: ignore[arg-type] # None is no tensor, and fails
                different.append(f"{name}: {key}")
    return different


@pytest.mark.matrix
@pytest.mark.parametrize(("make", "slot"), [(torch.optim.AdamW, "exp_avg"), (torch.optim.Adafactor, "row_var")])
def test_names_and_numbers_are_those_of_the_module_before(
    make: Callable[..., Optimizer], slot: str, tmp_path: Path
) -> None:
    names = [f"shard_{name}_aligned" for name in ("fsdp", "deepspeed_stage_1", "deepspeed_stage_2")]
    assert run_distributed(_differences, 2, names, make, slot, tmp_path) == [[], []]


def _wrapped(module: Compiled) -> None: ...


def _compiled_call(module: Compiled) -> None:
    module.net = module.net._orig_mod
    module.net.compile(backend="eager")


def _compiled_forward(module: Compiled) -> None:
    module.net = module.net._orig_mod
    module.net.forward = torch.compile(module.net.forward, backend="eager")


@pytest.mark.parametrize("change", [_wrapped, _compiled_call, _compiled_forward])
def test_graphs_are_seen_however_they_are_made(change: Callable[[Compiled], None]) -> None:
    module = Compiled(torch.optim.SGD)
    change(module)
    with pytest.raises(ConfigurationError, match=r"torch.compile makes a graph of net.*, but Z gathers"):
        refuse_compiled(module, "Z")


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
    make = torch.optim.AdamW

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


def _graphs(name: str, how: str, whole: bool, precision: str) -> tuple[int, int, dict[str, Tensor]]:
    """The graphs and graph breaks of a fit with validation, and its weights."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = Blocks(how, whole)
    trainer = quiet_trainer(strategy=name, precision=precision, max_epochs=2)
    trainer.fit(module)
    counted = torch._dynamo.utils.counters
    return counted["stats"]["unique_graphs"], counted["graph_break"].total(), all_parameters(trainer)


def _check_graphs(how: str, whole: bool, precision: str) -> None:
    graphs, breaks, wanted = _graphs("shard_ddp", how, whole, precision)
    with pytest.warns(match="^net.* compiled in place") if how == "in place" else nullcontext():
        found = _graphs("shard_fsdp", how, whole, precision)
    assert found[:2] == (graphs, breaks) == (2 if whole else 3, 0)
    assert differences(wanted, found[2]) == {}


CASES = [(how, whole, "32-true") for how in ("module", "in place", "forward") for whole in (True, False)]


@pytest.mark.parametrize(("how", "whole", "precision"), sampled([*CASES, ("module", False, "bf16-mixed")], 0))
def test_no_hook_breaks_a_graph_under_fsdp(how: str, whole: bool, precision: str) -> None:
    run_distributed(_check_graphs, 2, how, whole, precision)


def test_a_unit_is_around_a_graph() -> None:
    module = Blocks("module", whole=True)
    assert [unit.name for unit in find_units(module, "auto")] == ["net"]
    assert [unit.name for unit in find_units(Blocks("forward", whole=False), "auto")] == ["net.0", "net.1", "net.2"]
    assert find_units(Blocks("in place", whole=True), "auto") == []
    with pytest.raises(WrappingError, match=r"net\._orig_mod\.1 settings of its own, but it is inside a graph"):
        find_units(module, [UnitRule(pattern=r"net\._orig_mod\.1", compute="fp32")])


def test_a_name_is_found_by_both_spellings() -> None:
    module = Compiled(torch.optim.SGD)
    assert list(named_parameters(module)) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    names = fqns(module)
    assert names.canonical("net._orig_mod.0.weight") == names.canonical(WEIGHT) == WEIGHT
    with pytest.raises(ConfigurationError, match=r"no parameter 'net._orig_mod.1.weight'"):
        names.canonical("net._orig_mod.1.weight")


def _refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        quiet_trainer(strategy="shard_deepspeed_stage_3", max_steps=1).fit(Compiled(torch.optim.SGD))
    return str(error.value)


def test_stage_3_refuses_them_before_it_shards() -> None:
    (text,) = run_distributed(_refused, 1)
    assert text.startswith("torch.compile makes a graph of net, but ShardDeepSpeedStrategy(stage=3) gathers")
