"""Checkpoints without state of parameters that no step uses, as BERT's pooler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import full_tensor
from tests.harness import run_distributed
from tests.models import quiet_trainer

WRITER = "shard_fsdp_aligned"
READERS = ["shard_deepspeed_stage_1_aligned", "shard_deepspeed_stage_3_aligned"]


class Pooled(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.pooler = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        for name, _ in self.named_parameters():
            value = full_tensor(self.trainer, name)
            assert value is not None
            self.weights[name] = value


def _fit(strategy: str, steps: int, ckpt_path: str | None = None, save: str | None = None) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    module, trainer = Pooled(), quiet_trainer(strategy=strategy, max_steps=steps)
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(2)))
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.weights


def _runs(path: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    _fit(WRITER, 3, save=path)
    return _fit(WRITER, 6), [_fit(reader, 6, ckpt_path=path) for reader in READERS]


def test_every_engine_goes_on_from_a_checkpoint_without_its_state(tmp_path: Path) -> None:
    for straight, resumed in run_distributed(_runs, 2, str(tmp_path / "three.ckpt")):
        for reader, weights in zip(READERS, resumed, strict=True):
            assert [name for name in straight if not torch.equal(straight[name], weights[name])] == [], reader


class GoesBack(Pooled):
    """Loads an earlier checkpoint's weights and optimizer in mid-fit, as schedules of fine-tuning do."""

    path: str
    batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.batches == 8:
            strategy: Any = self.trainer.strategy
            checkpoint = strategy.load_checkpoint(self.path)
            strategy.load_model_state_dict(checkpoint)
            strategy.load_optimizer_state_dict(checkpoint)


def _goes_back(path: str) -> tuple[int, int]:
    _fit(WRITER, 3, save=path)
    module, trainer = GoesBack(), quiet_trainer(strategy=WRITER, max_epochs=2)
    module.path = path
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
    return module.batches, trainer.global_step


def test_a_checkpoint_that_is_loaded_in_mid_fit_leaves_the_loaders(tmp_path: Path) -> None:
    assert run_distributed(_goes_back, 2, str(tmp_path / "three.ckpt")) == [(16, 16)] * 2
