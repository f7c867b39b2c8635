"""Parameters that no rank, or not every rank, uses in a step: stepped as under torch's DDP, or refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError, full_tensor
from lightning_shard.engines import parameter_use
from lightning_shard.ranks import Ranks
from lightning_shard.registry import build
from tests.harness import DistributedError, run_distributed
from tests.models import quiet_trainer

FSDP = "shard_fsdp_aligned"
STAGES = [f"shard_deepspeed_stage_{stage}_aligned" for stage in (1, 2, 3)]


class Branches(pl.LightningModule):
    """Two branches of one shape, and a layer that nothing uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.steps = kind, 0
        self.one, self.other, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)
        if kind == "sizes":
            self.other.bias = None
        self.unused = nn.Linear(4, 4)
        self.found: dict[str, Tensor | None] = {}

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.kind == "order":
            both = [self.one, self.other][:: 1 - 2 * self.global_rank]
            return self.head(both[0](x).tanh() * both[1](x)).square().mean() + self.unused(x).square().mean()
        if self.kind == "times":
            for _ in range(1 + self.global_rank):
                x = self.unused(x)
        rank = self.global_rank
        takes = {
            "never": 1,
            "times": 1,
            "by step": self.steps,
            "by rank": rank,
            "sizes": rank,
            "late": self.steps // 5,
        }[self.kind]
        hidden = (self.other if takes % 2 else self.one)(x)
        return self.head(hidden.tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    def on_train_end(self) -> None:
        self.found = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))

    def forward(self, x: Tensor, takes: int) -> Tensor:
        found: Tensor = self.of[takes](x)
        return found


class InLeaf(Branches):
    """Ranks use different experts of a module that stage 3 gathers and reduces whole."""

    def __init__(self) -> None:
        super().__init__("by rank")
        self.one, self.other = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        # DeepSpeed reduces a leaf module's gradients when those of its inputs are there, which have to need them.
        self.unused, self.stem, self.experts = nn.Identity(), nn.Linear(4, 4), Experts()  # type: ignore[assignment]

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.experts(self.stem(x), self.global_rank).tanh()).square().mean()


class ByHand(Branches):
    """One optimizer or two, stepped in manual optimization; gradients of two steps add up where they are two."""

    def __init__(self, kind: str, optimizers: int) -> None:
        super().__init__(kind)
        self.automatic_optimization, self.count = False, optimizers

    def training_step(self, x: Tensor, batch_idx: int) -> None:
        self.manual_backward(super().training_step(x, batch_idx))
        optimizers = self.optimizers()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
            if self.count == 1 or batch_idx % 2:
                each.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = [[self.head, self.unused, self.one], [self.other]] if self.count == 2 else [[self]]
        return [torch.optim.AdamW(nn.ModuleList(part).parameters(), lr=0.1, weight_decay=0.1) for part in parts]


def _built(kind: str | None) -> Branches:
    if kind is None:
        return InLeaf()
    by_hand = {"never, by hand": ("never", 1), "by step, two by hand": ("by step", 2)}
    return ByHand(*by_hand[kind]) if kind in by_hand else Branches(kind)


def _fit(name: str, kind: str | None, precision: str = "32-true", **settings: Any) -> dict[str, Tensor | None]:
    pl.seed_everything(1, verbose=False)
    module = _built(kind)
    trainer = quiet_trainer(strategy=build(name, **settings), max_steps=6, precision=precision)
    trainer.fit(module, DataLoader(torch.randn(64, 4), 4))
    return module.found


def _different(names: list[str], kind: str, precision: str) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", kind, precision, find_unused_parameters=True)
    assert torch.equal(wanted["unused.weight"], _built(kind).unused.weight), "weight decay"
    found = {name: _fit(name, kind, precision) for name in names}
    return {n: wrong for n, one in found.items() if (wrong := [f for f in one if not torch.equal(one[f], wanted[f])])}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("never", [FSDP, *STAGES]),
        ("by step", [FSDP]),
        ("by rank", [FSDP]),
        pytest.param("never, by hand", [FSDP, *STAGES], marks=pytest.mark.matrix),
        pytest.param("by step, two by hand", [FSDP, *STAGES], marks=pytest.mark.matrix),
    ],
)
def test_what_no_rank_uses_is_not_stepped(kind: str, names: list[str], precision: str) -> None:
    assert run_distributed(_different, 2, names, kind, precision) == [{}, {}]


def _refused(name: str, kind: str, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        _fit(name, kind, **settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "kind", "settings", "said"),
    [
        (STAGES[0], "by step", {}, "In this one not all use: one.bias, one.weight, other.bias, other.weight"),
        *((stage, "sizes", {}, "In this one not all use: one.bias, one.weight, other.weight") for stage in STAGES[:2]),
        (STAGES[2], "sizes", {}, "Ranks take different branches: rank 0 runs one, rank 1 runs other"),
        (STAGES[2], "times", {}, "Ranks take different branches: rank 0 runs other, rank 1 runs unused"),
        (STAGES[1], "by rank", {}, "Ranks, or steps, use different parameters"),
        (
            STAGES[2],
            "by rank",
            {"stage3": {"param_persistence_threshold": 0}},
            "Ranks take different branches: rank 0 runs one, rank 1 runs other",
        ),
        (FSDP, "by rank", {"units": ["Linear"]}, "Ranks take different branches: rank 0 runs one, rank 1 runs other"),
        (STAGES[1], "order", {}, "Gradients come in different orders: rank 0 has"),
        (STAGES[2], "order", {}, "Ranks take different branches: rank 0 runs one, rank 1 runs other"),
        (FSDP, "times", {"units": ["Linear"]}, "Ranks take different branches: rank 0 runs other, rank 1 runs unused"),
        (FSDP, "late", {}, "uses other parameters than the first 3: one.bias, one.weight, other.bias, other.weight"),
    ],
)
def test_what_can_not_be_followed_is_refused(name: str, kind: str, settings: dict[str, Any], said: str) -> None:
    for told in run_distributed(_refused, 2, name, kind, **settings):
        assert said in told


class Late(Branches):
    """Two branches of one shape around a stem and a head, of which one is taken otherwise from the fifth step on."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.unused = nn.Linear(4, 4)
        self.batches = 0

    def on_train_end(self) -> None:
        if not isinstance(self.trainer.strategy, pl.strategies.DDPStrategy):
            super().on_train_end()

    def takes(self) -> tuple[bool, bool]:
        late, mine, odd = self.global_step >= 4, self.global_rank == 0, self.batches % 2 == 1
        return {
            "steady": (True, True),
            "one leaves": (True, not (late and mine)),
            "all leave": (True, not late),
            "one uses": (True, late and mine),
            "one leaves in a second micro-batch": (True, not (late and mine and odd)),
            "by step": (self.global_step % 2 == 0, self.global_step % 2 == 1),
            "one evaluates": (True, True),
        }[self.kind]

    def run(self, x: Tensor, one: bool, other: bool) -> Tensor:
        x = self.unused(x)
        hidden = self.one(x) if one else torch.zeros(len(x), 8)
        hidden = hidden + self.other(x) if other else hidden
        return self.head(hidden.tanh()).square().mean()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        one, other = self.takes()
        self.batches += 1
        return self.run(x, one, other)

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.run(x, True, not (self.global_step >= 4 and self.global_rank == 0))


def _fit_late(name: str, case: str, **settings: Any) -> tuple[dict[str, Tensor | None], list[int]]:
    """The parameters, and the steps in which ranks compared what they use."""
    parameter_use._WAIT = timedelta(seconds=2)
    pl.seed_everything(1, verbose=False)
    module = Late(case)
    data = DataLoader(torch.randn(64, 4), 4, shuffle=True)  # in stock Lightning's order
    accumulate = 2 if "micro" in case else 1
    validation = {"val_dataloaders": data} if case == "one evaluates" else {}
    trainer = quiet_trainer(
        strategy=name if name.startswith("ddp") else build(name, **settings),
        max_steps=6,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        val_check_interval=2 if validation else None,
    )
    counted = Ranks.same
    calls: list[int] = []

    def same(*args: Any, **kwargs: Any) -> Any:
        calls.append(trainer.global_step)
        return counted(*args, **kwargs)

    Ranks.same = same  # type: ignore[method-assign]
    try:
        trainer.fit(module, data, **validation)
    finally:
        Ranks.same = counted  # type: ignore[method-assign]
    return (module.found or {n: p.detach() for n, p in module.named_parameters()}), calls


UNITS = {"units": ["Linear"]}
GATHERED = {"stage3": {"param_persistence_threshold": 0}}
MATRIX = pytest.mark.matrix
LATE = [
    ("shard_fsdp", "one leaves", UNITS, "This step runs head where each step before runs other"),
    ("shard_fsdp", "one leaves", {}, "This step uses other parameters than the first 3: other.bias, other.weight"),
    ("shard_deepspeed_stage_1", "one leaves", {}, "other parameters than the first 3: other.bias, other.weight"),
    ("shard_deepspeed_stage_2", "one uses", {}, "other parameters than the first 3: other."),
    ("shard_deepspeed_stage_3", "one leaves", GATHERED, "This step runs head where each step before runs other"),
    ("shard_fsdp", "one evaluates", UNITS, "Ranks take different branches: rank 0 runs head, where each"),
]


@pytest.mark.parametrize(("name", "case", "settings", "said"), LATE)
def test_a_rank_that_changes_late_ends_all(name: str, case: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DistributedError) as raised:
        run_distributed(_fit_late, 2, name, case, timeout=60, **settings)
    assert raised.value.failed[0] == "DifferentUse"
    assert said in str(raised.value).replace("\n", " ")
    assert "find_unused_parameters: true" in str(raised.value)


def _refused_late(name: str, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        _fit_late(name, "all leave", **settings)
    return str(raised.value)


def test_ranks_that_change_late_together_are_told() -> None:
    for settings in (UNITS, {}):
        for told in run_distributed(_refused_late, 2, FSDP, **settings):
            assert "other" in told


def test_branches_in_turn_are_equal_to_stock_ddp() -> None:
    stock = run_distributed(_fit_late, 2, "ddp_find_unused_parameters_true", "by step")
    for case in ({}, UNITS):
        found = run_distributed(_fit_late, 2, FSDP, "by step", find_unused_parameters=True, **case)
        assert all(torch.equal(found[0][0][fqn], value) for fqn, value in stock[0][0].items())


@pytest.mark.parametrize(
    ("name", "settings"),
    [("shard_fsdp", UNITS), ("shard_deepspeed_stage_2", {}), ("shard_deepspeed_stage_3", GATHERED)],
)
def test_a_steady_step_compares_nothing(name: str, settings: dict[str, Any]) -> None:
    for _, steps in run_distributed(_fit_late, 2, name, "steady", **settings):
        assert max(steps) == 2  # of 0 to 5
        assert steps.count(1) == steps.count(2) == 1


def test_rare_branches_are_found_on_request() -> None:
    expected = run_distributed(_fit, 2, "shard_ddp_aligned", "late", find_unused_parameters=True)
    found = run_distributed(_fit, 2, FSDP, "late", find_unused_parameters=True)
    assert all(torch.equal(found[0][fqn], expected[0][fqn]) for fqn in expected[0])


def test_ranks_may_use_different_experts_of_a_leaf_module() -> None:
    wanted = run_distributed(_fit, 2, "shard_ddp_aligned", None, find_unused_parameters=True)
    stage3 = {"leaf_modules": ["Experts"], "param_persistence_threshold": 0}
    found = run_distributed(_fit, 2, STAGES[2], None, stage3=stage3)
    assert all(torch.equal(found[0][fqn], value) for fqn, value in wanted[0].items())
