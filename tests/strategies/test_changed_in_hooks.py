"""What hooks change after the model was sharded: followed as under DDP, or refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.optim import Optimizer

from lightning_shard import full_tensor
from lightning_shard.engines._dtensors import InFull
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, refusal


class Changes(Indexed):
    """The optimizer begins with the head alone."""

    optimizer: Callable[..., Optimizer] = torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        return type(self).optimizer(self.head.parameters(), lr=1e-2)


class AddsGroup(Changes):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": list(self.body.parameters())})  # type: ignore[union-attr]


class AddsGroupToFull(AddsGroup):
    optimizer = torch.optim.Adafactor


class Replaces(Changes):
    def on_train_start(self) -> None:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesLater(Changes):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesBetweenValidations(Changes):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 1:
            self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesBeforeValidation(Changes):
    def on_fit_start(self) -> None:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)


class ReplacesInSteps(Changes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head = nn.Linear(self.head.in_features, self.head.out_features)
        return super().training_step(batch, batch_idx)


class Copies(Changes):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self)


class Prunes(Changes):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            prune.l1_unstructured(self.head, "weight", 0.5)


GROUP, NEW = "add_param_group is called in a fit", "head.weight, head.bias came after the model was set up"


class Clips(Indexed):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)


class Pruned(Clips):
    def __init__(self) -> None:
        super().__init__()
        prune.identity(self.body[0], "weight")

    def on_train_end(self) -> None:
        prune.remove(self.body[0], "weight")


def _clipped(strategy: str) -> tuple[float, float]:
    """The largest weight as the fit leaves the module, and as it would be saved."""
    module, trainer = Pruned(), quiet_trainer(strategy=strategy, max_steps=2)
    trainer.fit(module, data(count=8))
    assert {"body.0.weight", "body.0.bias"} < dict(module.named_parameters()).keys()
    return module.head.weight.abs().max().item(), full_tensor(trainer, "head.weight").abs().max().item()


@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp"])
def test_what_a_hook_writes_after_the_last_step_stays(strategy: str) -> None:
    assert run_distributed(_clipped, 1, strategy) == [(pytest.approx(0.01),) * 2]


CASES: list[tuple[str, type[Indexed], str]] = [
    (
        "shard_deepspeed_stage_2",
        Clips,
        "Written to by no optimizer (such as by clamp_, or through parameter.data): head.w",
    ),
    ("shard_deepspeed_stage_1", AddsGroup, GROUP),
    ("shard_deepspeed_stage_3", AddsGroup, GROUP),
    ("shard_fsdp", AddsGroupToFull, GROUP),
    *((name, Replaces, NEW) for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1")),
    ("shard_deepspeed_stage_3", ReplacesBeforeValidation, NEW),
    *((name, ReplacesLater, NEW) for name in ("shard_ddp", "shard_fsdp")),
    *((name, ReplacesInSteps, NEW) for name in ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2")),
    ("shard_fsdp", ReplacesBetweenValidations, NEW),
    ("shard_fsdp", Copies, "Copy it before, in __init__, setup or"),
    ("shard_fsdp", Prunes, "torch.nn.utils.prune does if it is applied after the model was set up to train. Apply"),
    ("shard_deepspeed_stage_2", Prunes, "head.weight (head.weight_orig now) got other names after the model was set"),
]


def _refusals(cases: list[tuple[str, type[Indexed], str]]) -> list[str]:
    wrong = []
    for strategy, kind, said in cases:
        trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=1)
        error, message = refusal(trainer.fit, kind(), data(count=8), data(count=8))
        if said not in message or error != "ConfigurationError":
            wrong.append(f"{strategy}, {kind.__name__}: {error}: {message}")
    return wrong


def test_what_can_not_be_followed_is_refused() -> None:
    assert run_distributed(_refusals, 1, CASES) == [[]]


@pytest.mark.matrix
def test_it_is_refused_on_all_ranks() -> None:
    assert run_distributed(_refusals, 2, CASES) == [[], []]


class Redraws(Indexed):
    """Sizes that ranks do not divide."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for module in (self.head, self.body[0], self.body[2]):
                for kind in (nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.eye_, nn.init.trunc_normal_):
                    kind(module.weight)
            self.head.reset_parameters()
        if batch_idx == 2:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter) + 0.01 * torch.bernoulli(parameter.sigmoid()))

        if batch_idx == 3:
            with torch.no_grad():
                self.body[0].weight[0].mul_(0.5)
                self.body[2].weight[3, 2] = 1.0
                self.head.bias.copy_(torch.full((1,), 0.5, device=self.device))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            slopes = torch.linspace(0.5, 1, parameter.numel(), device=parameter.device)
            parameter.grad.mul_(slopes.view(parameter.shape))
            parameter.grad[-1] = 0.0
            row = parameter.grad[:1]  # Of one row, which the other ranks have nothing of.
            lowest = torch.stack([row.min(), row.amin(), row.min(0)[0].sum(), *torch.aminmax(row), -row.argmin()]).sum()
            if lowest < 0 or (parameter.grad < -0.05).any():  # Each rank's shards would answer for themselves.
                parameter.grad.add_(0.1 * torch.randn_like(parameter.grad))


class Masks(Indexed):
    """Manual optimization that writes plain tensors to gradients and parameters in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, "train"))
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(_thirds(parameter))
        optimizer.step()
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), [_thirds(parameter) for parameter in self.parameters()])


def _thirds(like: torch.Tensor) -> torch.Tensor:
    return (torch.arange(like.numel(), device=like.device).view(like.shape) % 3 > 0).float()


def test_plain_tensors_are_written_in_manual_steps() -> None:
    names = ["shard_ddp", "shard_fsdp_offload"]
    assert run_distributed(_redrawn_each, 2, names, "32-true", Masks) == [[]] * 2
    assert run_distributed(_redrawn_each, 2, ["shard_ddp", "shard_fsdp_hybrid"], "bf16-mixed", Masks) == [[]] * 2


def _redrawn(strategy: str, precision: str, kind: type[Indexed]) -> dict[str, torch.Tensor | None]:
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=6)
    pl.seed_everything(0)
    trainer.fit(module := kind(), data(count=12))
    values = {name: full_tensor(trainer, name) for name, _ in module.named_parameters()}
    return {**values, "generator": torch.get_rng_state()}


def _redrawn_each(strategies: Sequence[str], precision: str, kind: type[Indexed] = Redraws) -> list[str]:
    first, *others = ((name, _redrawn(name, precision, kind)) for name in strategies)
    expected = first[1]
    return [
        f"{name}: {key}"
        for name, found in others
        for key, value in found.items()
        if value is None or not value.equal(expected[key])
    ]


@pytest.mark.parametrize(
    ("names", "precision", "processes"),
    [
        (["shard_ddp", "shard_fsdp"], "32-true", 2),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                (["shard_ddp", "shard_fsdp_offload", "shard_fsdp_hybrid"], "32-true", 2),
                (["shard_ddp_aligned", "shard_fsdp_aligned", "shard_fsdp_hybrid_aligned"], "bf16-mixed", 2),
                (["shard_ddp_aligned", "shard_fsdp_aligned"], "bf16-mixed", 3),
                (["shard_ddp_aligned", "shard_fsdp_hybrid_aligned"], "bf16-mixed", 4),
            )
        ),
    ],
)
def test_shards_are_drawn_and_asked_as_full_tensors(names: list[str], precision: str, processes: int) -> None:
    assert run_distributed(_redrawn_each, processes, names, precision) == [[]] * processes


def test_nothing_is_left_of_how_they_are_asked() -> None:
    before = dict(DTensor._op_dispatcher._custom_op_handlers), DTensor.full_tensor
    undo, again = InFull.answer(), InFull.answer()
    assert DTensor._op_dispatcher._custom_op_handlers != before[0]
    assert DTensor.full_tensor is not before[1]
    again()
    undo()
    assert (DTensor._op_dispatcher._custom_op_handlers, DTensor.full_tensor) == before
