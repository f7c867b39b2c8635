"""Optimizers, clipping, accumulation and manual optimization under the Trainer: sharded as replicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError, ShardPrecision
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole
from tests.strategies.indexed import PRECISIONS, Indexed, refusal, same_everywhere, samples


class Norms(Indexed):
    """Notes the logged norm and one that the test computes from whole gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [whole(p.grad) for p in self.parameters()]
        assert len(gradients) == 6
        self.own = torch.cat([g.flatten().double() for g in gradients]).norm().float().item()

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append((self.trainer.callback_metrics["grad_norm"].item(), self.own))


@PRECISIONS
@pytest.mark.parametrize(
    "flags",
    sampled([{"gradient_clip_val": 0.1}, {}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}], 0),
    ids=["norm", "unclipped", "value"],
)
def test_gradient_norm_is_logged(precision: str, flags: dict[str, Any]) -> None:
    run = same_everywhere(
        Norms, precision, strategies=("ddp", "full", "offload"), options={"log_grad_norm": True}, **flags
    )
    assert len(run["notes"]) == 6
    assert all(logged == own > 0.1 for logged, own in run["notes"])


class AddsUp(Indexed):
    """A user's `optimizer_step` that leaves every other batch's gradients for the next one, and warms the rate up."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer_closure()
            return
        for group in optimizer.param_groups:
            group["lr"] = self.lr * (batch_idx + 1) / 6
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Skips(Indexed):
    """Has no loss for some batches, the last one of an accumulation among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (3, 4) else loss


def test_gradients_left_for_the_next_step() -> None:
    same_everywhere(AddsUp, "32-true", strategies=("ddp", "full", "zero_2"))


@pytest.mark.parametrize(
    ("strategies", "sync"), [(("ddp", "full", "zero_2"), "micro_batch"), (("ddp", "full"), "boundary")]
)
def test_one_process_may_have_no_loss(strategies: tuple[str, ...], sync: str) -> None:
    flags = {"ranks": 1, "accumulate_grad_batches": 2}
    same_everywhere(Skips, "32-true", strategies=strategies, options={"accumulate_sync": sync}, **flags)


class Ignored(nn.Linear):
    """Stays whole on every rank under FSDP, so that its gradients are averaged apart."""


class ManualWithIgnored(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = Ignored(8, 1)
        self.notes: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, "train"))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.notes.append(self.trainer.callback_metrics["grad_norm"].item())


def test_ignored_modules_count_in_clipping_by_hand() -> None:
    strategies = ("ddp", "full_ignoring")
    assert min(same_everywhere(ManualWithIgnored, "bf16-mixed", strategies=strategies)["notes"]) > 0.1


class RanksDiffer(TinyLM):
    def configure_optimizers(self) -> Any:
        betas = (0.9, 0.9 + 0.05 * self.global_rank)
        return torch.optim.AdamW(self.parameters(), lr=1e-3 * (1 + self.global_rank), betas=betas)


def _made_differently() -> tuple[str, str]:
    return refusal(quiet_trainer(strategy="shard_fsdp", max_steps=1).fit, RanksDiffer(), loader())


def test_ranks_must_make_the_same_optimizers() -> None:
    for kind, text in run_distributed(_made_differently, 2):
        assert kind == "ConfigurationError"
        assert "lr is 0.002, betas is (0.9, 0.95" in text
        assert "lr is 0.001, betas is (0.9, 0.9)" in text


class Several(torch.optim.SGD):
    """Calls its closure three times in a step, as LBFGS does, and steps between."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            closure()
            super().step()
        return super().step(closure)


class CallsSeveral(Indexed):
    def configure_optimizers(self) -> Any:
        return Several(self.parameters(), lr=0.05)


@PRECISIONS
def test_optimizer_that_calls_its_closure_several_times(precision: str) -> None:
    same_everywhere(CallsSeveral, precision, gradient_clip_val=0.1)


class Recursive(nn.Module):
    """Calls itself, and uses its parameters after it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, again: int = 2) -> Tensor:
        x = torch.tanh(self.enter(x))
        return self.leave(self(x, again - 1) if again else x)


class CallsItself(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Sequential(Recursive(), Recursive()))


@PRECISIONS
def test_units_that_call_themselves(precision: str) -> None:
    same_everywhere(CallsItself, precision, strategies=("ddp", "full", "grad_op"))


class LooksBack(Indexed):
    """Forwards without a backward between backward and step: what they gather must not outlive the step."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        x = torch.ones(1, 8)
        for block in self.blocks:
            x = block(x)
        self.notes.append(float(x.sum()))


@PRECISIONS
def test_forward_between_backward_and_step(precision: str) -> None:
    same_everywhere(LooksBack, precision, strategies=("ddp", "full", "grad_op"))


class Halved(Indexed):
    """A backward of its own, which `manual_backward` calls too."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(*args, **kwargs)


class TwoPasses(Halved):
    """The second one goes through the first one's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch, "train")
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        optimizer.step()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sampled([TwoPasses, Halved], 0))
@PRECISIONS
def test_a_backward_of_the_modules_own(kind: type[Halved], precision: str) -> None:
    run = same_everywhere(kind, precision, strategies=("ddp", "full", "zero_2", "zero_3"))
    torch.manual_seed(1)
    assert not torch.equal(run["parameters"]["head.bias"], kind().head.bias)


class OwnBackward(Indexed):
    """Manual optimization without ``manual_backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "train").backward()
        self.optimizers().step()


def backward_by_itself(name: str, precision: str) -> str:
    trainer = quiet_trainer(strategy=name, plugins=[ShardPrecision(precision)], max_steps=2)
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(OwnBackward(), DataLoader(samples(), batch_size=2))
    return str(refused.value)


@pytest.mark.parametrize(("name", "precision"), [("shard_deepspeed_stage_2", "32-true"), ("shard_fsdp", "16-mixed")])
def test_a_step_after_a_backward_of_the_modules_own_is_refused(name: str, precision: str) -> None:
    (said,) = run_distributed(backward_by_itself, 1, name, precision)
    assert "Call self.manual_backward(loss), not loss.backward()." in said
