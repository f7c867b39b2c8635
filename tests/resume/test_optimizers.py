"""An optimizer's own numbers go on after a resume."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import run_distributed
from tests.models import quiet_trainer

WIDTH = 4


class SavesFirst(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class Warm(torch.optim.AdamW):
    """Steps by how often it has stepped, which is in none of its groups."""

    calls = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rate = lr

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = self.rate / self.calls
        return super().step(closure)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> Any:
        return Warm(self.parameters(), lr=0.05)


def _fit(steps: int, path: str | None = None, save: str | None = None, first: str | None = None) -> list[Any]:
    settings: dict[str, Any] = {"strategy": "shard_fsdp", "max_steps": steps, "log_every_n_steps": 1}
    module, trainer = Net(), quiet_trainer(**settings, callbacks=[SavesFirst(first)] if first else [])
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, 4, shuffle=True), ckpt_path=path)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    return [p.full_tensor().tolist() for p in module.parameters()]  # type: ignore[attr-defined]


def _resumed() -> Any:
    straight = _fit(6)
    _fit(3, save="half.ckpt")
    resumed = _fit(6, "half.ckpt", first="again.ckpt")
    # Saved ahead of the moment at which a resumed run is given back what is each rank's own.
    return straight, resumed, _fit(6, "again.ckpt")


def test_numbers_that_an_optimizer_keeps_go_on() -> None:
    for straight, resumed, again in run_distributed(_resumed, 2):
        assert straight == resumed == again
