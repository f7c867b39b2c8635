"""Units with settings of their own: when they are freed changes no number, and their dtype is seen where it is used."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_shard import MeshConfig, ShardFSDPStrategy, UnitRule
from lightning_shard.engines.units import find_units
from lightning_shard.errors import ConfigurationError, MeshError, PrecisionError, WrappingError
from lightning_shard.strategies.strategy import ShardStrategy
from tests.engines.test_units import Root, layers, names
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, TWICE, differences
from tests.strategies.zero import Manual

FREED = [{"pattern": r"blocks\.0", "reshard_after_forward": False}, {"modules": 100}, "Embedding"]
WIDE = [{"pattern": "head", "compute": "fp32"}, {"modules": ["LayerNorm"], "compute": "fp32"}, "Block"]
HEAD = {"head.weight", *(f"blocks.{i}.norm.{kind}" for i in range(3) for kind in ("weight", "bias"))}


class Watched(TinyLM):
    """Knows the parameters that modules have read in fp32."""

    def configure_model(self) -> None:
        super().configure_model()
        self.wide: set[str] = set()
        for name, part in self.named_modules():
            part.register_forward_pre_hook(partial(self._look, name))

    def _look(self, name: str, part: nn.Module, args: Any) -> None:
        own = part.named_parameters(recurse=False)
        self.wide |= {f"{name}.{key}" for key, parameter in own if parameter.dtype == torch.float32}


def _fit(strategy: ShardStrategy | str, precision: str) -> tuple[Watched, Final]:
    pl.seed_everything(1, verbose=False)
    module, final = Watched(), Final()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, callbacks=[final])
    trainer.fit(module, loader())
    return module, final


def _freed(precision: str) -> tuple[list[Any], list[str]]:
    strategy = ShardFSDPStrategy(aligned=True, units=FREED)  # type: ignore[arg-type]
    module, found = _fit(strategy, precision)
    _, wanted = _fit("shard_ddp_aligned", precision)
    units = {name: m for name, m in module.named_modules() if isinstance(m, FSDPModule)}
    stays = [name for name, m in units.items() if m._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None]
    return stays, [n for n, value in wanted.parameters.items() if not torch.equal(value, found.parameters[n])]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
def test_when_units_are_freed_changes_no_number(precision: str) -> None:
    # The root stays gathered too.
    assert run_distributed(_freed, 2, precision) == [(["", "blocks.0"], [])] * 2


def _wide() -> tuple[set[str], list[str], bool]:
    module, found = _fit(ShardFSDPStrategy(aligned=True, units=WIDE), "bf16-mixed")  # type: ignore[arg-type]
    replicated = ShardFSDPStrategy(aligned=True, units=WIDE, mesh=MeshConfig(replicate=2, shard=1))  # type: ignore[arg-type]
    _, other = _fit(replicated, "bf16-mixed")
    _, plain = _fit("shard_fsdp_aligned", "bf16-mixed")
    different = [n for n, value in found.parameters.items() if not torch.equal(value, other.parameters[n])]
    changed = not torch.equal(found.parameters["head.weight"], plain.parameters["head.weight"])
    return module.wide, different, changed


def test_a_units_dtype_is_seen_and_replicas_have_the_numbers_of_shards() -> None:
    for wide, different, changed in run_distributed(_wide, 2):
        assert wide == HEAD
        assert (different, changed) == ([], True)


def _refused(units: list[Any], precision: str) -> str:
    with pytest.raises((MeshError, PrecisionError, WrappingError)) as error:
        quiet_trainer(strategy=ShardFSDPStrategy(units=units), precision=precision, max_steps=1).fit(TinyLM(), loader())
    return str(error.value)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (UnitRule(pattern="block.0"), "the whole name of no module with parameters and a forward of its own"),
        (UnitRule(modules=["Block"], reshard_after_forward=3), "reshard_after_forward is 3, but a number must divide"),
        (UnitRule(modules=["Block"], compute="fp16"), "small gradients of fp16 are lost without a loss scale"),
    ],
)
def test_what_the_model_or_the_run_lacks_is_refused(entry: UnitRule, reason: str) -> None:
    (text,) = run_distributed(_refused, 1, [entry], "bf16-mixed")
    assert reason in text


def test_auto_takes_embeddings_and_heads_that_are_as_large_as_a_block() -> None:
    blocks = {"stack": nn.ModuleList(layers(2))}  # of 44 parameters
    large, small = {"embed": nn.Embedding(11, 4), "head": nn.Linear(4, 11)}, {"one": nn.Embedding(10, 4)}
    found = find_units(Root(**large, **blocks, **small), "auto")
    assert [(u.name, u.standalone, u.rule.reshard_after_forward) for u in found] == [
        ("embed", True, None),
        ("head", True, False),  # its backward comes next
        ("stack.0", False, None),
        ("stack.1", False, None),
    ]
    # Without blocks, tied to each other or to a block, and in lists of rules, they are the root's.
    assert names(Root(**large), "auto") == []
    tied = Root(embed=nn.Embedding(11, 4), head=nn.Linear(4, 11, bias=False), **blocks)
    tied.head.weight = tied.embed.weight
    assert names(tied, "auto") == ["stack.0", "stack.1"]
    assert names(Root(**large, **blocks), ["Layer"]) == ["stack.0", "stack.1"]


class Apart(TinyLM):
    """Its embedding and head are as large as its blocks, and used in the ways of ``how``."""

    def __init__(self, *, how: str, **kwargs: Any) -> None:
        super().__init__(width=4, **kwargs)
        self.how, self.freed = how, list[bool]()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen + self.shift
        for block in self.blocks:
            x = block(x)
        self.freed.append(isinstance(self.embed.weight, DTensor))
        if self.how == "called in parts":
            return torch.cat([self.head(part) for part in x.chunk(2, 1)], 1)
        return self.head(x) + (functional.linear(x, self.embed.weight) if self.how == "embedding is a head" else 0)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        decay = self.head.weight.square().mean() if self.how == "read before" else 0
        loss = super().loss(batch) + decay
        return loss + (self.head.weight.square().mean() if self.how == "read after" else 0)


class ApartManual(Manual, Apart):
    """Accumulates, clips and steps by hand."""


CALLED = ["called in parts", "read after"]  # The head stays gathered from its forward to its backward.
READ = ["read before", "embedding is a head"]


def _apart(how: str, kind: type[Any], precision: str, trainer: dict[str, Any]) -> dict[str, tuple[list[str], Any]]:
    reference = "ddp" if precision == "32-true" else "zero_2"
    parameters: dict[str, dict[str, Tensor]] = {}
    found = {}
    for name in (reference, "full", "grad_op", "offload", "ddp"):
        pl.seed_everything(1, verbose=False)
        module, final = kind(how=how), Final()
        units = {"units": [{"modules": "auto"}]} if how in READ and name in ("full", "grad_op", "offload") else {}
        fit = quiet_trainer(
            strategy=ENGINES[name](aligned=True, **units),
            precision=precision,
            max_steps=4,
            callbacks=[final],
            **trainer,
        )
        fit.fit(module, loader())
        parameters[name] = final.parameters
        made = [fqn for fqn, m in module.named_modules() if isinstance(m, FSDPModule)]
        found[name] = made, module.freed, differences(parameters[reference], final.parameters)
    return found


APART = [
    (how, kind, precision, trainer)
    for how in (*CALLED, *READ)
    for kind, trainer in ((Apart, TWICE), *([(ApartManual, {})] if how in CALLED else []))
    for precision in ("32-true", "bf16-mixed")
]


@pytest.mark.parametrize(
    ("how", "kind", "precision", "trainer"),
    sampled(APART, APART.index(("called in parts", Apart, "bf16-mixed", TWICE))),
)
def test_embeddings_and_heads_are_units_of_their_own_or_the_roots_that_a_step_may_read(
    how: str, kind: type[Any], precision: str, trainer: dict[str, Any]
) -> None:
    for found in run_distributed(_apart, 2, how, kind, precision, trainer, timeout=300):
        assert [each[2] for each in found.values()] == [{}] * len(found)
        for name in ("full", "offload"):
            units, freed, _ = found[name]
            blocks = [f"blocks.{i}" for i in range(3)]
            assert units == (["", "embed", *blocks, "head"] if how in CALLED else ["", *blocks])
            assert freed[-1] == (kind is Apart and how in CALLED)


def _read_of_units() -> list[str]:
    said = []
    for how in READ:
        with pytest.raises(ConfigurationError) as error:
            quiet_trainer(strategy="shard_fsdp", max_steps=2).fit(Apart(how=how), loader())
        said.append(str(error.value))
    return said


def test_a_read_of_them_outside_of_their_forward_says_how_they_are_the_roots() -> None:
    for said in run_distributed(_read_of_units, 2):
        assert all("set units: [{modules: auto}] (with shard_fsdp)" in each for each in said)
