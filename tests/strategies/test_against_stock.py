"""Stock Lightning's ``ddp`` as the reference: parity among our own engines can't see a fault that all of them share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard.engines.replicated as replicated
from lightning_shard import full_tensor
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

WIDTH, STEPS = 6, 5
NAMES = ["shard_ddp", "shard_fsdp_aligned", "shard_deepspeed_stage_1", "shard_deepspeed_stage_3_aligned"]


class Plain(pl.LightningModule):
    """Draws random numbers in its step, on each rank its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.weights: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).tanh()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noise = 0.1 * torch.randn_like(batch[0])
        return functional.mse_loss(self(batch[0] + noise), batch[0].roll(1, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        stock = type(self.trainer.strategy).__module__.startswith("lightning.")
        for name, parameter in self.named_parameters():
            value = parameter if stock else full_tensor(self.trainer, name)
            assert value is not None
            self.weights[name] = value.detach().clone()


class Normed(Plain):
    """Running statistics, which each rank has of its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.drop.running_mean.clone()  # type: ignore[operator]


class Bank(Plain):
    """A queue of what was seen, which no checkpoint has."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(8, WIDTH), persistent=self.persistent)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        bank: Any = self.bank
        out = self(batch[0])
        loss = (out @ bank.clone().T).logsumexp(1).mean() + out.square().mean()
        bank.copy_(torch.cat([bank[len(out) :], out.detach()]))
        return loss


class SavedBank(Bank):
    persistent = True


def weights(strategy: str, kind: type[Plain], given: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after a fit, and what the module adds to them: those that validate do so after every other step."""
    pl.seed_everything(11, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = quiet_trainer(strategy=strategy, max_steps=STEPS, val_check_interval=2, limit_val_batches=2, **given)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
    return module.weights


def differences(
    kind: type[Plain], names: list[str], given: dict[str, Any], reference: str = "ddp"
) -> dict[str, list[str]]:
    """The names of what differs from a fit under ``reference``, for each of the strategies ``names``."""
    expected = weights(reference, kind, given)
    found = {name: weights(name, kind, given) for name in names}
    return {name: [w for w in expected if not torch.equal(expected[w], own[w])] for name, own in found.items()}


# Engines that reduce at the boundary alone sum micro-batches as stock does.
TWICE = {"accumulate_grad_batches": 2}
CASES = [(Plain, {}), (Normed, {}), (Bank, {}), (SavedBank, {}), (Bank, TWICE), (Normed, TWICE)]


@pytest.mark.parametrize(("kind", "given"), sampled(CASES, 1, 2))
def test_every_engine_has_stock_ddps_weights(kind: type[Plain], given: dict[str, Any]) -> None:
    names = ["shard_ddp", "shard_deepspeed_stage_1"] if given else NAMES
    for found in run_distributed(differences, 2, kind, names, given):
        assert found == {name: [] for name in names}


def test_one_process_has_the_weights_of_a_stock_one() -> None:
    for found in run_distributed(differences, 1, Bank, NAMES, {}):
        assert found == {name: [] for name in NAMES}


def _without_sharing() -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated.SharedBuffers, "share", lambda self: None)
        return differences(Bank, ["shard_ddp"], {})


def test_the_comparison_sees_buffers_that_are_not_shared() -> None:
    assert all(found["shard_ddp"] for found in run_distributed(_without_sharing, 2))
