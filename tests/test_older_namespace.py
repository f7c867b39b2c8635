"""A package that is written against ``pytorch_lightning`` trains by this package's names, unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
import lightning_fabric.utilities.seed
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.strategies import StrategyRegistry

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def forecast(strategy):
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    stop = EarlyStopping("loss", check_on_train_epoch_end=True)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=[stop], **off)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    return f"{type(trainer.strategy).__name__} {trainer.global_step}"
"""


def _run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "forecaster.py").write_text(PACKAGE)
    (folder / "script.py").write_text(script)
    return subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=folder)


def test_a_package_of_the_older_namespace_trains(tmp_path: Path) -> None:
    ended = _run(
        tmp_path,
        "import lightning_shard.pytorch_lightning\nfrom forecaster import forecast\nprint(forecast('shard_fsdp'))\n",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "ShardFSDPStrategy 2"


@pytest.mark.matrix
def test_it_has_to_be_imported_first(tmp_path: Path) -> None:
    ended = _run(tmp_path, "import pytorch_lightning\nimport lightning_shard.pytorch_lightning\n")
    assert ended.returncode == 1
    assert "ImportError: pytorch_lightning was imported before lightning_shard.pytorch_lightning" in ended.stderr
