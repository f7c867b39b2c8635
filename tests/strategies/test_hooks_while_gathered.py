"""Hooks in moments when parameters are gathered: they see and write the masters, as after a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from lightning_shard import ShardFSDPStrategy, full_tensor
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.strategies.indexed import Indexed, data


class Teaches(Indexed):
    """A teacher that follows between forward and backward, and weights of validation that are put back."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(self.body, self.head)).requires_grad_(False)
        # Units of their own, of which a hook calls the first before any step, and nothing the others.
        self.judges = nn.ModuleList(nn.Sequential(nn.Linear(3, 90), nn.Linear(90, 1)) for _ in range(3)).requires_grad_(
            False
        )
        self.found: dict[str, Tensor] = {}

    def on_fit_start(self) -> None:
        self.found["judged"] = self.judges[0](torch.ones(1, 3, device=self.device)).detach().float()
        self.found["first"] = self.head(self.body(torch.ones(1, 3, device=self.device))).detach().float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.inference_mode():  # its first use
            wanted = self.teacher(batch[1]) + sum(judge(batch[1]) for judge in self.judges)
        given = checkpoint(self.head, checkpoint(self.body, batch[1], use_reentrant=False), use_reentrant=False)
        return self.loss(batch, "train") + mse_loss(given, wanted.clone())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        own, others = [*self.body.parameters(), *self.head.parameters()], list(self.teacher.parameters())
        with torch.no_grad():
            if self.global_step % 2:
                torch._foreach_lerp_(others, own, 0.25)
            else:
                for teacher, parameter in zip(others, own, strict=True):
                    teacher.copy_(teacher * 0.75 + parameter * 0.25)

    def on_before_backward(self, loss: Tensor) -> None:
        self._look("before_backward")

    def on_validation_epoch_start(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("validated", self.loss(batch, "val"), sync_dist=True)

    def on_validation_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), 0.5)

    def on_validation_epoch_end(self) -> None:
        self._look(f"after {self.trainer.state.fn}")
        self.found[f"sample, {self.trainer.state.fn}"] = (
            self.head(self.body(torch.ones(1, 3, device=self.device))).detach().float()
        )
        with torch.no_grad():
            for parameter, kept in zip(self.parameters(), self.kept, strict=True):
                parameter.copy_(kept)

    on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _look(self, when: str) -> None:
        sums = [parameter.detach().double().square().sum() for parameter in self.parameters()]
        assert all(parameter.dtype == torch.float32 for parameter in self.parameters())
        self.found[f"{when}, step {self.global_step}"] = torch.tensor([float(number) for number in sums])


def _fit(strategy: str, precision: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Teaches()
    trainer = quiet_trainer(
        strategy=strategy, precision=precision, max_steps=4, val_check_interval=2, limit_val_batches=2
    )
    trainer.fit(module, data(count=16), data(count=16))
    trainer.test(module, data(count=16))
    logged = {name: value.float() for name, value in trainer.callback_metrics.items()}
    return {**module.found, **logged, **{n: full_tensor(trainer, n) for n, _ in module.named_parameters()}}


STRATEGIES = ["shard_fsdp", "shard_fsdp_grad_op", "shard_fsdp_offload"]


@pytest.mark.parametrize(
    ("strategy", "precision"), sampled([(s, p) for s in STRATEGIES for p in ("32-true", "bf16-mixed")], 3)
)
def test_hooks_see_and_write_masters_while_parameters_are_gathered(strategy: str, precision: str) -> None:
    expected, found = (run_distributed(_fit, 2, name, precision)[0] for name in ("shard_ddp", strategy))
    # fp64 sums of squares over shards, in another order.
    wrong = [n for n, value in expected.items() if not torch.allclose(found[n], value, rtol=1e-6, atol=0)]
    assert (wrong, found.keys()) == ([], expected.keys())
    assert [n for n in expected if "." in n and not torch.equal(found[n], expected[n])] == []


class SkipsInValidation(Indexed):
    """Validates without its second unit, which is gathered with the first, and changes that unit then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if self.training or index != 1:
                x = block(x)
        return super().forward(x)

    def on_validation_end(self) -> None:
        with torch.no_grad():
            self.blocks[1][0].weight.mul_(0.5)


def _gathered_ahead() -> list[dict[str, Tensor]]:
    found = []
    for units in (0, 1):
        torch.manual_seed(1)
        module, strategy = SkipsInValidation(), ShardFSDPStrategy(forward_prefetch=units)
        quiet_trainer(strategy=strategy, max_steps=1, num_sanity_val_steps=1).fit(module, data(), data())
        found.append({name: whole(parameter) for name, parameter in module.named_parameters()})
    return found


def test_a_unit_that_was_gathered_ahead_and_did_not_run_has_its_new_values() -> None:
    for apart, ahead in run_distributed(_gathered_ahead, 2):
        assert [name for name in apart if not torch.equal(apart[name], ahead[name])] == []


class ChangesInTheStep(Indexed):
    """Manual optimization, whose hooks run inside of the step: they read and change gradients by the parameters' own
    names, and call modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.shift = nn.Parameter(torch.zeros(3))
        self.recurrent = nn.GRU(3, 3)  # which takes no shards
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        given = self.head(self.body(self.recurrent(batch[1])[0] + self.shift))
        self.manual_backward(mse_loss(given, batch[1].sum(-1, keepdim=True)))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_after_backward(self) -> None:
        for parameter in (self.shift, self.head.weight):
            assert parameter.grad is not None
            self.norms.append(float(parameter.grad.norm()))
            parameter.grad.mul_(0.5)
        self.norms.append(float(self.head(self.body(self.recurrent(torch.ones(1, 3))[0])).detach()))


def _fit_in_the_step(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, units = ChangesInTheStep(), {} if "ddp" in strategy else {"units": ["Sequential"]}  # others in the root's
    trainer = quiet_trainer(strategy=build(strategy, **units), max_steps=3)
    trainer.fit(module, data(count=16))
    return module.norms, {n: full_tensor(trainer, n) for n, _ in module.named_parameters()}


def test_hooks_in_a_manual_step_see_the_gradients() -> None:
    names = ("shard_ddp_aligned", "shard_fsdp_aligned")
    (norms, expected), (seen, found) = (run_distributed(_fit_in_the_step, 2, name)[0] for name in names)
    assert seen == pytest.approx(norms, rel=1e-6)  # of shards, in another order
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
