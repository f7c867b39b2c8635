"""Hooks between steps see and write shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from lightning_shard import ShardDDPStrategy, full_tensor
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.strategies.indexed import Indexed, data, refusal


class Teaches(Indexed):
    """A teacher that follows after each step, and weights that are halved in validation and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(self.body, self.head)).requires_grad_(False)
        # Units of their own, of which a hook calls the first before any step, and nothing the others.
        judges = (nn.Sequential(nn.Linear(3, 90), nn.Linear(90, 1)) for _ in range(3))
        self.judges = nn.ModuleList(judges).requires_grad_(False)
        self.found: dict[str, Tensor] = {}

    def _sample(self, name: str) -> None:
        x = torch.ones(1, 3, device=self.device)
        self.found[name] = torch.cat([self.judges[0](x), self.head(self.body(x))]).detach().float()

    def on_fit_start(self) -> None:
        self._sample("first")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[1]) + sum(judge(batch[1]) for judge in self.judges)
        given = checkpoint(self.head, checkpoint(self.body, batch[1], use_reentrant=False), use_reentrant=False)
        return self.loss(batch, "train") + mse_loss(given, wanted.clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._look("step")
        for parameter in (p for p in self.parameters() if p.grad is not None):
            parameter.grad.mul_(0.5)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self._look("batch")
        own, others = [*self.body.parameters(), *self.head.parameters()], list(self.teacher.parameters())
        if self.global_step % 2:
            torch._foreach_lerp_(others, own, 0.25)
        else:
            for teacher, parameter in zip(others, own, strict=True):
                teacher.copy_(teacher * 0.75 + parameter * 0.25)

    def on_validation_epoch_start(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]
        self._halve()

    @torch.no_grad()
    def _halve(self, *args: Any) -> None:
        self._look("evaluation")
        torch._foreach_mul_(list(self.parameters()), 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("validated", self.loss(batch, "val"), sync_dist=True)

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        self._look(f"after {self.trainer.state.fn}")
        self.log("norm", self.head.weight.norm())
        self._sample(f"sample, {self.trainer.state.fn}")
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.copy_(kept)

    on_validation_batch_end = on_test_batch_end = _halve
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end

    def _look(self, when: str) -> None:
        """Parameters that were gathered for a step are sharded again."""
        for name, parameter in self.named_parameters():
            assert parameter.dtype == torch.float32
            assert isinstance(parameter, DTensor) or isinstance(self.trainer.strategy, ShardDDPStrategy), (when, name)


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


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "precision"), sampled([(s, p) for s in STRATEGIES for p in ("32-true", "bf16-mixed")], 3)
)
def test_hooks_between_steps_see_and_write_shards(strategy: str, precision: str) -> None:
    expected, found = (run_distributed(_fit, 2, name, precision)[0] for name in ("shard_ddp", strategy))
    # The norm of shards is the root of their sums.
    wrong = [n for n, value in expected.items() if not torch.allclose(found[n], value, rtol=1e-6, atol=0)]
    assert (wrong, found.keys()) == ([], expected.keys())
    assert [n for n in expected if "." in n and not torch.equal(found[n], expected[n])] == []


class LogsOnRank0(Indexed):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.head.weight.norm(), rank_zero_only=True)


def _logged() -> str:
    return refusal(quiet_trainer(strategy="shard_fsdp", max_steps=2).fit, LogsOnRank0(), data())[1]


def test_a_sharded_tensor_is_logged_on_all_ranks_alone() -> None:
    for said in run_distributed(_logged, 2):
        assert "self.log('norm', ..., rank_zero_only=True) has a sharded tensor" in said
