"""What a module may ask of its strategy under the Trainer, or do without."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters
from tests.strategies.everywhere import same_everywhere
from tests.strategies.indexed import ALL, BOTH, Indexed, data, refusal

# What a module may ask of its strategy


class Collective(Indexed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = self.global_rank
        self.log("mean", float(rank), sync_dist=True)
        self.log("total", float(rank + 1), sync_dist=True, reduce_fx="sum")
        self.log("epoch_max", float(10 * rank + batch_idx), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("own", float(rank))
        output = self(batch[1])
        gathered = self.all_gather(output, sync_grads=True)
        nested = self.all_gather({"rank": torch.tensor([rank]), "list": [torch.tensor(rank * 2.0)]})
        assert nested["rank"].flatten().tolist() == [0, 1]
        assert nested["list"][0].tolist() == [0.0, 2.0]
        assert gathered.shape == (2, *output.shape)
        assert torch.equal(gathered[rank], output)
        strategy = self.trainer.strategy
        strategy.barrier("here")
        assert strategy.broadcast({"from": rank}) == {"from": 0}
        assert strategy.broadcast(rank, src=1) == 1
        assert strategy.reduce(torch.tensor(float(rank + 1))).item() == 1.5
        assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item() == 3
        assert strategy.reduce("text") == "text"
        assert strategy.reduce_boolean_decision(rank == 1) is False
        assert strategy.reduce_boolean_decision(rank == 1, all=False) is True
        assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (2, rank, rank == 0)
        return {"loss": gathered.square().mean(), "extra": output.detach()}


def _collectives(strategy: str, precision: str) -> tuple[dict[str, float], Any]:
    pl.seed_everything(1, verbose=False)
    module = Collective()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, limit_train_batches=3)
    trainer.fit(module, data())
    return {k: v.item() for k, v in trainer.callback_metrics.items()}, whole_parameters(module)


@ALL
def test_collectives_of_the_module_and_the_strategy(strategy: str, precision: str) -> None:
    (one, parameters), (other, others) = run_distributed(_collectives, 2, strategy, precision)
    assert (one["mean"], one["total"], one["epoch_max"]) == (0.5, 3.0, 12.0)
    assert (one.pop("own"), other.pop("own")) == (0.0, 1.0)
    assert one == other
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


class NoOptimizer(Indexed):
    def configure_optimizers(self) -> None:
        return None


def _without_optimizer(strategy: str) -> tuple[bool, int]:
    pl.seed_everything(1, verbose=False)
    module = NoOptimizer()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=2).fit(module, data(), data())
    end = whole_parameters(module)
    return all(torch.equal(start[name], end[name]) for name in start), len(module.seen["train"])


@BOTH
def test_fit_without_an_optimizer_changes_nothing(strategy: str) -> None:
    assert run_distributed(_without_optimizer, 2, strategy) == [(True, 2)] * 2


def _sync_batchnorm(strategy: str) -> None:
    quiet_trainer(strategy=strategy, sync_batchnorm=True)


@BOTH
def test_sync_batchnorm_is_refused_on_cpu(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _sync_batchnorm, strategy):
        assert kind == "ConfigurationError"
        assert "sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs alone" in message


class ChannelsLast(Indexed):
    """Its convolution's weight lies in memory as the kernels for that layout want it."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :1, None, None] * torch.linspace(0.1, 1, 36).view(6, 6)
        return super().forward(self.images(images.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def test_parameters_have_one_layout_in_memory() -> None:
    """Else kernels sum in an order that depends on whether the engine shards."""
    same_everywhere(ChannelsLast, "32-true")
