"""`load_from_checkpoint`, and a checkpoint in the ``full`` form under plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    load_from_checkpoint,
    tools,
)
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*srun.*")

ROWS = torch.randn(32, 5, generator=torch.Generator().manual_seed(3))


class Regression(pl.LightningModule):
    """Hyperparameters, dropout, a buffer, a tie, two groups and a scheduler."""

    def __init__(self, width: int = 4, *, meta: bool = False, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["note"])
        self.note = note
        self.loaded_epoch = -1

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(0)
        with torch.device("meta" if self.hparams.meta else "cpu"):
            self.first = nn.Linear(5, self.hparams.width)
            self.norm = nn.BatchNorm1d(5)
            self.second = nn.Linear(self.hparams.width, 5)
            self.tied = nn.Linear(5, self.hparams.width)
            self.tied.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(self.norm(rows)).tanh() + self.tied(rows))

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return (self(rows) - rows).square().mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded_epoch = checkpoint["epoch"]

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        rest = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": rest}], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def trained(
    path: str, strategy: str, epochs: int = 2, ckpt_path: str | None = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Fit with one of our strategies and save; the parameters and buffers."""
    module = Regression(width=6, **kwargs)
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs)
    trainer.fit(module, DataLoader(ROWS, 4), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:  # alone, in the processes that trained
        assert load_from_checkpoint(Regression, path).hparams.width == 6
    return whole_parameters(module) | dict(module.named_buffers())


def stock(epochs: int, ckpt_path: str | None = None) -> pl.Trainer:
    torch.set_num_threads(1)  # as the harness' workers
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(width=6), DataLoader(ROWS, 4), ckpt_path=ckpt_path, weights_only=True)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    path = str(tmp_path_factory.mktemp("saved") / "a.ckpt")
    return path, run_distributed(trained, 2, path, "shard_fsdp")[0]


def test_a_module_is_built_and_filled(saved: tuple[str, dict[str, Tensor]]) -> None:
    path, expected = saved
    module = load_from_checkpoint(Regression, path)
    assert module.hparams.width == 6
    assert module.loaded_epoch == 2
    assert module.tied.weight is module.first.weight
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_from_checkpoint(Regression, path, note="mine").note == "mine"
    on_meta = load_from_checkpoint(Regression, path, strict=True, meta=True)
    assert torch.equal(on_meta.norm.running_mean, expected["norm.running_mean"])
    assert torch.equal(on_meta.second.weight, expected["second.weight"])
    tools.convert(path, "memory://lfc/a.ckpt", form="portable")
    stored = load_from_checkpoint(Regression, "memory://lfc/a.ckpt", note="mine")
    assert (stored.note, torch.equal(stored.second.weight, expected["second.weight"])) == ("mine", True)


class Larger(Regression):
    def configure_model(self) -> None:
        super().configure_model()
        self.third = nn.Linear(2, 2)


class Lenient(Larger):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strict_loading = False


def test_what_does_not_fit_is_refused(saved: tuple[str, dict[str, Tensor]], tmp_path: Path) -> None:
    path, _ = saved
    with pytest.raises(
        CheckpointMismatchError, match=r"(?s)of another shape .*model\.first\.bias \(6,\) there, \(7,\) here"
    ):
        load_from_checkpoint(Regression, path, width=7)
    with pytest.raises(CheckpointMismatchError, match=r"missing in the checkpoint \(2\): model\.third\.bias"):
        load_from_checkpoint(Larger, path)
    assert load_from_checkpoint(Larger, path, strict=False).first.weight.shape == (6, 5)
    assert load_from_checkpoint(Lenient, path).first.weight.shape == (6, 5)
    with pytest.raises(CheckpointNotFoundError):
        load_from_checkpoint(Regression, tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="no manifest"):
        load_from_checkpoint(Regression, tmp_path)


def test_plain_lightning_goes_on_from_the_full_form(tmp_path: Path) -> None:
    """Two epochs of ours, converted, and two more of a stock Trainer are four epochs of a stock Trainer."""
    path, full = str(tmp_path / "a.ckpt"), str(tmp_path / "full.ckpt")
    run_distributed(trained, 1, path, "shard_ddp")
    write_full(full, open_any(path))
    resumed, whole = stock(4, full), stock(4)
    assert resumed.global_step == whole.global_step == 32
    assert resumed.lightning_module.loaded_epoch == 2
    expected = whole.lightning_module.state_dict()
    for name, tensor in resumed.lightning_module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    groups = whole.optimizers[0].state_dict()["param_groups"]
    assert resumed.optimizers[0].state_dict()["param_groups"] == groups
    loaded = Regression.load_from_checkpoint(full, weights_only=True)
    assert loaded.hparams.width == 6
