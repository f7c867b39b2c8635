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


SCRIPT = """
import sys
sys.modules["pytorch_lightning"] = sys  # another module of that name
try:
    import lightning_shard.pytorch_lightning
except ImportError as error:
    print(error)
del sys.modules["pytorch_lightning"]
import lightning_shard.pytorch_lightning
from forecaster import forecast
print(forecast("shard_fsdp"))
"""


@pytest.mark.matrix
def test_a_package_of_the_older_namespace_trains(tmp_path: Path) -> None:
    (tmp_path / "forecaster.py").write_text(PACKAGE)
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    refused, *_, trained = ended.stdout.splitlines()
    assert refused.startswith("pytorch_lightning was imported before lightning_shard.pytorch_lightning")
    assert trained == "ShardFSDPStrategy 2"
