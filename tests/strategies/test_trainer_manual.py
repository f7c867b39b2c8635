"""Manual optimization, and loops of an optimizer's own: sharded as replicated as by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError, ShardPrecision
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import PRECISIONS, Indexed, data, samples

# Manual optimization


class Gan(pl.LightningModule):
    """Two optimizers with their schedulers, the other's parameters switched off in each turn.

    The generator's output for the discriminator's turn comes from a forward without a backward.
    """

    def __init__(self, discriminator_first: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.shift = nn.Parameter(torch.zeros(3))
        self.discriminator_first = discriminator_first
        self.batches: list[list[int]] = []
        self.notes: list[Any] = []

    def fake(self, x: Tensor) -> Tensor:
        return self.generator(functional.pad(x, (0, 1), value=0.5)) + self.shift

    def score(self, x: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(x).float()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def turn(self, optimizer: Any, loss: Callable[[], Tensor], clip: float) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss())
        self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
        optimizer.step()
        # Not before the backward pass: a gradient that leaked into the other's parameters must count.
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        others = [p for o in self.optimizers() if o is not optimizer for g in o.param_groups for p in g["params"]]
        self.notes.append(sum(p.grad is not None and bool(whole(p.grad).any()) for p in others))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        index, x = batch
        self.batches.append(index.tolist())
        generator, discriminator = self.optimizers()

        def generated() -> Tensor:
            return self.score(self.fake(x), real=True)

        def discriminated() -> Tensor:
            return self.score(x, real=True) + self.score(self.fake(x).detach(), real=False)

        turns = [(generator, generated, 0.2), (discriminator, discriminated, 0.1)]
        for turn in reversed(turns) if self.discriminator_first else turns:
            self.turn(*turn)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam([*self.generator.parameters(), self.shift], lr=0.05)
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (generator, discriminator)]
        return [generator, discriminator], schedulers


class DiscriminatorFirst(Gan):
    def __init__(self) -> None:
        super().__init__(discriminator_first=True)


@pytest.mark.matrix
@PRECISIONS
@pytest.mark.parametrize("module", sampled([Gan, DiscriminatorFirst], 0))
def test_adversaries_with_an_optimizer_each(module: type[Gan], precision: str) -> None:
    # torch's DDP must be told that a backward pass leaves parameters out.
    run = same_everywhere(module, precision, strategies=("ddp_unused", "full", "grad_op", "offload"))
    assert run["steps"] == 24
    assert run["notes"] == [0] * 24
    by_hand = adversaries_by_hand(module, precision)
    for name, value in run["parameters"].items():
        # Two halves of a batch and their mean, or the whole batch: another order of sums. In bf16 each half's
        # gradient is rounded to 2**-9 of its size, and steps of lr=0.05 at most follow from it.
        torch.testing.assert_close(value, by_hand[name], rtol=0, atol=1e-5 if precision == "32-true" else 5e-2)


def adversaries_by_hand(build_module: type[Gan], precision: str) -> dict[str, Tensor]:
    """The same training with torch alone, in fp32, on the batches of both ranks together."""
    torch.manual_seed(1)
    module = build_module()
    optimizers, schedulers = module.configure_optimizers()
    sampler = [torch.utils.data.DistributedSampler(samples(), 2, rank, shuffle=True, seed=1) for rank in range(2)]
    for epoch in range(2):
        for part in sampler:
            part.set_epoch(epoch)
        loaders = [DataLoader(samples(), batch_size=2, sampler=part) for part in sampler]
        for parts in zip(*loaders, strict=True):
            x = torch.cat([part[1] for part in parts])
            for turn in (1, 0) if module.discriminator_first else (0, 1):
                if turn == 0:
                    loss = module.score(module.fake(x), real=True)
                else:
                    loss = module.score(x, real=True) + module.score(module.fake(x).detach(), real=False)
                module.zero_grad()
                loss.backward()
                parameters = [p for g in optimizers[turn].param_groups for p in g["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, (0.2, 0.1)[turn])
                optimizers[turn].step()
        for scheduler in schedulers:
            scheduler.step()
    return {name: p.detach() for name, p in module.named_parameters()}


class ManualAccumulation(Indexed):
    """Manual optimization that steps on every third batch, and two backward passes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, "train") / 3)
        self.manual_backward(self(batch[1]).float().square().mean() / 30)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.matrix
@PRECISIONS
def test_manual_accumulation_with_two_backward_passes(precision: str) -> None:
    strategies = ("ddp", "full", "grad_op", "zero_2", "zero_3")
    run = same_everywhere(ManualAccumulation, precision, strategies=strategies)
    assert run["steps"] == 4


class Scaled(Indexed):
    """A step of another optimizer between the backward pass and that of a parameter that FSDP leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gain = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        others, own = self.optimizers()
        self.manual_backward(self.gain * (1 + self.global_rank) + self.loss(batch, "train"))
        others.step()
        # By which another average would be seen: in fp32 the mean of equal numbers is that number, or nearly so.
        self.gain.grad.add_(self.global_rank)
        self.clip_gradients(own, gradient_clip_val=9.0, gradient_clip_algorithm="norm")
        own.step()

    def configure_optimizers(self) -> Any:
        others = [p for p in self.parameters() if p is not self.gain]
        return [torch.optim.SGD(others, lr=0.1), torch.optim.SGD([self.gain], lr=1.0)], []


def _gain() -> float:
    module = Scaled()
    quiet_trainer(strategy="shard_fsdp", max_epochs=1, limit_train_batches=1).fit(module, data())
    return module.gain.item()


def test_gradients_of_full_parameters_are_averaged_once_a_step() -> None:
    assert run_distributed(_gain, 2) == [-1.5, -2.5]


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
    same_everywhere(CallsSeveral, precision, strategies=("ddp", "full", "grad_op"), gradient_clip_val=0.1)


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


class TiedHead(Indexed):
    """The step goes on after the module's own forward, with a layer that is gathered together with one inside of it; a
    hook runs one of the two alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Linear(3, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.inner.weight
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.body(x)))

    def loss(self, batch: Any, stage: str) -> Tensor:
        self._note(stage, batch[0])
        return (self.head(self(batch[1])).float().mean(-1) - batch[1].sum(-1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch, "train"))
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(float(self.head(torch.ones(1, 8, device=self.device)).float().sum()))


def test_a_layer_of_a_unit_that_forward_runs_in_part() -> None:
    run = same_everywhere(TiedHead, "bf16-mixed", strategies=("ddp", "full", "zero_2", "zero_3"))
    assert len(set(run["notes"])) == len(run["notes"])  # each of the new weights


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


class Halved(Indexed):
    """A backward of its own, which `manual_backward` calls too."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(*args, **kwargs)


class HalvedByHand(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.passes(self.loss(batch, "train"))
        optimizer.step()

    def passes(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class TwoPasses(HalvedByHand):
    """The second one goes through the first one's loss."""

    def passes(self, loss: Tensor) -> None:
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)


@pytest.mark.parametrize("kind", [Halved, HalvedByHand])
@PRECISIONS
def test_a_backward_of_the_modules_own(kind: type[Halved], precision: str) -> None:
    run = same_everywhere(kind, precision, strategies=("ddp", "full", "zero_1", "zero_2", "zero_3"))
    torch.manual_seed(1)
    assert not torch.equal(run["parameters"]["head.bias"], kind().head.bias)


def test_two_passes_of_a_backward_of_the_modules_own() -> None:
    same_everywhere(TwoPasses, "bf16-mixed", strategies=("ddp", "full", "zero_2", "zero_3"))


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
