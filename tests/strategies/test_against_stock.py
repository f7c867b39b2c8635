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
from lightning_shard.errors import ConfigurationError
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


class Stateful(Plain):
    """Random numbers, running statistics of each rank's own batches, and a queue of samples that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]
        self.register_buffer("bank", torch.zeros(8, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.drop.running_mean.clone()  # type: ignore[operator]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        bank: Any = self.bank
        out = self(batch[0] + 0.1 * torch.randn_like(batch[0]))
        loss = (out @ bank.clone().T).logsumexp(1).mean() + out.square().mean()
        bank.copy_(torch.cat([bank[len(out) :], out.detach()]))
        return loss


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
CASES = [(Plain, {}), (Stateful, {}), (Stateful, TWICE)]


@pytest.mark.parametrize(("kind", "given"), sampled(CASES, 1))
def test_every_engine_has_stock_ddps_weights(kind: type[Plain], given: dict[str, Any]) -> None:
    names = ["shard_ddp", "shard_deepspeed_stage_1"] if given else NAMES
    for found in run_distributed(differences, 2, kind, names, given):
        assert found == {name: [] for name in names}


def test_one_process_has_the_weights_of_a_stock_one() -> None:
    for found in run_distributed(differences, 1, Stateful, NAMES, {}):
        assert found == {name: [] for name in NAMES}


def _without_sharing() -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated.SharedBuffers, "share", lambda self: None)
        return differences(Stateful, ["shard_ddp"], {})


def test_the_comparison_sees_buffers_that_are_not_shared() -> None:
    assert all(found["shard_ddp"] for found in run_distributed(_without_sharing, 2))


class Adapted(Plain):
    """A net with two names, and a reference pass with adapters switched off, as of PEFT for DPO."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.holder = nn.Module()
        self.holder.model = self.net
        self.adapter, self.switched_on = nn.Linear(WIDTH, WIDTH, bias=False), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x) + self.holder.model(x + 1)  # type: ignore[operator]
        return self.last(self.first(x) + self.adapter(x) if self.switched_on else self.first(x))

    def loss(self, x: Tensor) -> Tensor:
        self._switch(False)
        with torch.no_grad():
            reference = self(x)
        self._switch(True)
        return functional.mse_loss(self(x), reference + 1)

    def _switch(self, on: bool) -> None:
        self.adapter.requires_grad_(on)
        self.switched_on = on

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.weights[f"validated {self.global_step}"] = self.loss(batch[0]).detach()


class Codebook(Plain):
    """Steps a parameter inside of forward, by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.steps_codes = torch.optim.SGD(self.codes.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            functional.mse_loss(self.codes(hidden.detach()), x).backward()
            self.steps_codes.step()
            self.steps_codes.zero_grad()
        return self.last(hidden + self.codes(hidden).detach())


class Wide(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).tanh()).double()).float()


def test_they_have_stock_ddps_weights() -> None:
    for found in run_distributed(differences, 2, Adapted, NAMES, {}):
        assert found == {name: [] for name in NAMES}


def test_ddp_keeps_fp64_as_stock_does() -> None:
    assert run_distributed(differences, 2, Wide, ["shard_ddp"], {}) == [{"shard_ddp": []}] * 2


def _refused(kind: type[Plain], names: list[str]) -> list[str]:
    found = []
    for name in names:
        with pytest.raises(ConfigurationError) as refused:
            weights(name, kind, {})
        found.append(str(refused.value))
    return found


def test_a_step_inside_of_forward_is_refused_alike() -> None:
    for found in run_distributed(_refused, 2, Codebook, NAMES[:3]):
        assert len(set(found)) == 1
        assert found[0].startswith("SGD, which configure_optimizers does not return, steps codes.weight inside a ")
