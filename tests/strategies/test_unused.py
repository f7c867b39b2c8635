"""Parameters that no rank, or not every rank, uses in a step: stepped as under torch's DDP, or refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import full_tensor
from lightning_shard.engines import parameter_use
from lightning_shard.ranks import Ranks
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import DistributedError, run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import refusal

FSDP = "shard_fsdp_aligned"
STAGES = [f"shard_deepspeed_stage_{stage}_aligned" for stage in (1, 2, 3)]
UNITS = {"units": ["Linear"]}
GATHERED = {"stage3": {"param_persistence_threshold": 0}}


class Branches(pl.LightningModule):
    """A stem, two branches of one shape and a head. Of the branches and the stem ``kind`` says which are used when."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.steps = kind, 0
        self.stem, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        if kind == "sizes":
            self.other.bias = None
        self.found: dict[str, Tensor | None] = {}

    def takes(self) -> tuple[int, bool, bool]:
        """How often the stem runs, and whether each branch does."""
        rank, late = self.global_rank, self.global_step >= 4
        return {
            "never": (0, False, True),
            "by step": (0, self.steps % 2 == 0, self.steps % 2 == 1),
            "by rank": (0, rank == 0, rank == 1),
            "sizes": (0, rank == 0, rank == 1),
            "times": (1 + rank, False, True),
            "late": (0, not late, late),
            "steady": (1, True, True),
            "one leaves": (1, True, not (late and rank == 0)),
            "all leave": (1, True, not late),
            "one uses": (1, True, late and rank == 0),
            "one evaluates": (1, True, True),
        }[self.kind]

    def run(self, x: Tensor, stems: int, one: bool, other: bool) -> Tensor:
        for _ in range(stems):
            x = self.stem(x)
        hidden = sum(branch(x) for branch, used in ((self.one, one), (self.other, other)) if used)
        return self.head(hidden.tanh()).square().mean()  # type: ignore[union-attr]

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.kind == "order":
            both = [self.one, self.other][:: 1 - 2 * self.global_rank]
            return self.head(both[0](x).tanh() * both[1](x)).square().mean() + self.stem(x).square().mean()
        return self.run(x, *self.takes())

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.run(x, 1, True, not (self.global_step >= 4 and self.global_rank == 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    def on_train_end(self) -> None:
        stock = type(self.trainer.strategy).__module__.startswith("lightning.")
        for name, parameter in self.named_parameters():
            self.found[name] = parameter.detach() if stock else full_tensor(self.trainer, name)


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
        self.one, self.other, self.experts = nn.Identity(), nn.Identity(), Experts()  # type: ignore[assignment]

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        # DeepSpeed reduces a leaf module's gradients when those of its inputs are there, which have to need them.
        return self.head(self.experts(self.stem(x), self.global_rank).tanh()).square().mean()


def _fit(name: str, kind: str, precision: str = "32-true", **settings: Any) -> dict[str, Tensor | None]:
    pl.seed_everything(1, verbose=False)
    module = InLeaf() if kind == "in a leaf" else Branches(kind)
    data = DataLoader(torch.randn(64, 4), 4, shuffle=True)  # in stock Lightning's order
    trainer = quiet_trainer(
        strategy=name if name.startswith("ddp") else build(name, **settings),
        precision=precision,
        max_steps=6,
        limit_val_batches=1,
        val_check_interval=2 if kind == "one evaluates" else None,
    )
    trainer.fit(module, data, data if kind == "one evaluates" else None)
    return module.found


def _different(names: list[str], kind: str, precision: str) -> dict[str, list[str]]:
    wanted = _fit("shard_ddp_aligned", kind, precision, find_unused_parameters=True)
    assert torch.equal(wanted["stem.weight"], Branches(kind).stem.weight), "weight decay"  # type: ignore[arg-type]
    found = {name: _fit(name, kind, precision) for name in names}
    return {n: wrong for n, one in found.items() if (wrong := [f for f in one if not torch.equal(one[f], wanted[f])])}  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
@pytest.mark.parametrize(("kind", "names"), [("never", [FSDP, *STAGES]), ("by rank", [FSDP])])
def test_what_no_rank_uses_is_not_stepped(kind: str, names: list[str], precision: str) -> None:
    assert run_distributed(_different, 2, names, kind, precision) == [{}, {}]


def _as_wanted(wanted: str, name: str, kind: str, **settings: Any) -> list[str]:
    unused = {} if wanted.startswith("ddp") else {"find_unused_parameters": True}
    one, other = _fit(wanted, kind, **unused), _fit(name, kind, **settings)
    return [fqn for fqn, value in one.items() if not torch.equal(other[fqn], value)]  # type: ignore[arg-type]


def test_branches_in_turn_are_equal_to_stock_ddp() -> None:
    settings = {"find_unused_parameters": True, **UNITS}
    assert run_distributed(_as_wanted, 2, "ddp_find_unused_parameters_true", FSDP, "by step", **settings) == [[], []]


def test_ranks_may_use_different_experts_of_a_leaf_module() -> None:
    stage3 = {"leaf_modules": ["Experts"], "param_persistence_threshold": 0}
    assert run_distributed(_as_wanted, 2, "shard_ddp_aligned", STAGES[2], "in a leaf", stage3=stage3) == [[], []]


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (STAGES[0], "by step", {}, "In this one not all use: one.bias, one.weight, other.bias, other.weight"),
    (STAGES[1], "sizes", {}, "In this one not all use: one.bias, one.weight, other.weight"),
    (STAGES[1], "by rank", {}, "Ranks, or steps, use different parameters"),
    (STAGES[1], "order", {}, "Gradients come in different orders: rank 0 has"),
    (STAGES[2], "times", {}, "Ranks take different branches: rank 0 runs other, rank 1 runs stem"),
    (STAGES[2], "order", {}, "Ranks take different branches: rank 0 runs one, rank 1 runs other"),
    (FSDP, "by rank", UNITS, "Ranks take different branches: rank 0 runs one, rank 1 runs other"),
    (FSDP, "late", {}, "uses other parameters than the first 3: one.bias, one.weight, other.bias, other.weight"),
    (FSDP, "all leave", UNITS, "other"),
]


@pytest.mark.parametrize(("name", "kind", "settings", "said"), REFUSED)
def test_what_can_not_be_followed_is_refused(name: str, kind: str, settings: dict[str, Any], said: str) -> None:
    for error, told in run_distributed(refusal, 2, _fit, name, kind, **settings):
        assert error in ("ConfigurationError", "DifferentUse")
        assert said in told


LATE = [
    ("shard_fsdp", "one leaves", UNITS, "This step runs head where each step before runs other"),
    ("shard_deepspeed_stage_2", "one uses", {}, "other parameters than the first 3: other."),
    ("shard_fsdp", "one leaves", {}, "This step uses other parameters than the first 3: other.bias, other.weight"),
    ("shard_deepspeed_stage_3", "one leaves", GATHERED, "This step runs head where each step before runs other"),
    ("shard_fsdp", "one evaluates", UNITS, "Ranks take different branches: rank 0 runs head, where each"),
]


def _fit_late(name: str, kind: str, **settings: Any) -> None:
    parameter_use._WAIT = timedelta(seconds=2)
    _fit(name, kind, **settings)


@pytest.mark.parametrize(("name", "kind", "settings", "said"), sampled(LATE, 0, 1))
def test_a_rank_that_changes_late_ends_all(name: str, kind: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DistributedError) as raised:
        run_distributed(_fit_late, 2, name, kind, timeout=60, **settings)
    assert raised.value.failed[0] == "DifferentUse"
    assert said in str(raised.value).replace("\n", " ")
    assert "find_unused_parameters: true" in str(raised.value)


def _compared(name: str, **settings: Any) -> list[int]:
    """The optimizer steps that were done when ranks compared something, from the first forward on."""
    modules: list[Branches] = []
    same, step, calls = Ranks.same, Branches.training_step, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Branches, "training_step", lambda self, x, index: modules.append(self) or step(self, x, index))
        patch.setattr(Ranks, "same", lambda *args: calls.extend(m.global_step for m in modules[-1:]) or same(*args))
        _fit(name, "steady", **settings)
    return calls


@pytest.mark.parametrize(
    ("name", "settings"),
    sampled([("shard_fsdp", UNITS), ("shard_deepspeed_stage_2", {}), ("shard_deepspeed_stage_3", GATHERED)], 0),
)
def test_a_steady_step_compares_nothing(name: str, settings: dict[str, Any]) -> None:
    for steps in run_distributed(_compared, 2, name, **settings):
        assert max(steps) == 2  # of 0 to 5
        assert steps.count(1) == steps.count(2) == 1
