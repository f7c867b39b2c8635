"""Optimizers that do more than step: they write between steps, read the loss, draw numbers, keep state of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from lightning_shard.errors import ConfigurationError
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.optimizers import Noisy
from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import PRECISIONS, Indexed, data


class Averaging(torch.optim.SGD):
    """As ScheduleFree has other values for evaluation, and as MADGRAD counts its steps in its state."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        return super().step(closure)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class Scaled(Indexed):
    def configure_optimizers(self) -> Any:
        return Averaging([{"params": [p]} for p in self.parameters()], lr=0.05)

    def _scale(self, factor: float) -> None:
        optimizer: Any = self.optimizers()
        getattr(optimizer, "optimizer", optimizer).scale(factor)

    def on_validation_start(self) -> None:
        self._scale(0.5)

    def on_validation_end(self) -> None:
        self._scale(2.0)


@pytest.mark.matrix
@PRECISIONS
def test_what_an_optimizer_writes_outside_of_its_step_is_seen(precision: str) -> None:
    same_everywhere(Scaled, precision, strategies=("ddp", "full", "zero_2", "zero_3", "zero_3_offload"))


class ByLoss(torch.optim.Optimizer):
    """As Polyak's step size and AliG: larger steps where the loss is larger. Its step may come without a loss."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = 1.0
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * loss * group["lr"])
        return loss


class SteppedByLoss(Indexed):
    def configure_optimizers(self) -> Any:
        return ByLoss(self.parameters())


class WeighedByLoss(SteppedByLoss):
    """Weights of losses come with a step after backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": torch.tensor(3.0 + self.global_rank)}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (SteppedByLoss, "bf16-mixed"),
        pytest.param(SteppedByLoss, "32-true", marks=pytest.mark.matrix),
        pytest.param(WeighedByLoss, "32-true", marks=pytest.mark.matrix),
    ],
)
def test_ranks_step_by_the_mean_of_their_losses(kind: Any, precision: str) -> None:
    same_everywhere(kind, precision, strategies=("ddp", "full", "zero_2", "zero_3"))


class DecaysByHand(Indexed):
    """Weight decay of its own, over the optimizer's groups, after the step."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for group in self.trainer.optimizers[0].param_groups:
                torch._foreach_mul_(group["params"], 0.9)


@PRECISIONS
def test_what_is_written_in_place_to_the_optimizers_parameters_is_there(precision: str) -> None:
    same_everywhere(DecaysByHand, precision, strategies=("ddp", "full", "zero_2", "zero_3_offload"))


class ClipsLate(Indexed):
    """Writes that torch does not count, and that begin when the run is under way."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step > 5:
            self.head.weight.data.clamp_(-0.02, 0.02)


def test_what_hooks_begin_to_write_to_shards_later_is_there() -> None:
    same_everywhere(ClipsLate, "32-true", strategies=("ddp", "full"))


class Drawing(Indexed):
    """Ranks draw different numbers before each step, and the optimizer draws in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1 + self.global_rank)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters(), lr=0.01)


@PRECISIONS
def test_replicas_draw_the_same_numbers_in_a_step(precision: str) -> None:
    same_everywhere(Drawing, precision, strategies=("ddp",))


class MadeEarly(torch.optim.SGD):
    """As DeMo, makes its state in its constructor, and computes with plain tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["scale"] = torch.full_like(p, 0.5, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.addcmul_(self.state[p]["scale"], torch.full(p.shape, 0.01, device=p.device))
        return loss


class SteppedByMadeEarly(Indexed):
    def configure_optimizers(self) -> Any:
        return MadeEarly(self.parameters(), lr=0.05)


def test_state_of_a_constructor_goes_to_what_replicas_step() -> None:
    same_everywhere(SteppedByMadeEarly, "bf16-mixed", strategies=("ddp",))


class HookedApart(Indexed):
    """A hook changes the gradients of each rank otherwise."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(1 + self.global_rank)


class GivenApart(SteppedByLoss):
    """The optimizer's step is given each rank's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch, "train")
        self.manual_backward(loss)
        self.optimizers().step(loss=loss.detach())


class Judge(Metric):
    """Its network is no part of the model, and DDP does not count it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def update(self) -> None: ...

    def compute(self) -> None: ...


class LeavesOut(Indexed):
    """DDP waits for the head's gradients, and has reduced none."""

    def __init__(self) -> None:
        super().__init__()
        head = self.head
        del self.head
        self.judge, self.head = Judge(), head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch[1]).square().mean()


class LeavesOutAtLast(Indexed):
    """No step follows at whose beginning DDP would look."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return self.body(batch[1]).square().mean() if self.trainer.is_last_batch else loss


def _refused(kind: Any) -> str:
    trainer = quiet_trainer(strategy="shard_ddp", max_epochs=1)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(kind(), data())
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (HookedApart, "Ranks have other values of body.0.weight"),
        (GivenApart, "other values on each"),
        (LeavesOut, "does not depend on head.weight, head.bias, and DDP waits"),
        (LeavesOutAtLast, "does not depend on head.weight, head.bias, and DDP waits"),
    ],
)
def test_what_parts_replicas_is_refused(kind: Any, says: str) -> None:
    assert all(says in error for error in run_distributed(_refused, 2, kind))
