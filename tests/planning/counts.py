"""Models whose memory is predicted and counted."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard.registry import PRESETS
from tests.models import VOCAB, TinyLM, llama


class Causal(pl.LightningModule):
    """A Hugging Face Llama made from a configuration."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            sizes = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
            self.model = llama(**sizes, **heads)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch[0]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Convolutions(pl.LightningModule):
    """Kernels, batch norm with buffers, two parameter groups and another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(24, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(3)
        )
        self.embed = nn.Embedding(VOCAB, 24)
        self.head = nn.Linear(24, VOCAB)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0]).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, momentum=0.9)


MODELS = {
    "tied and frozen": lambda: TinyLM(width=48, tie=True),
    "Llama": Causal,
    "convolutions": Convolutions,
}


def names() -> list[str]:
    """Every name but those with the aligned contract."""
    return [name for name, preset in PRESETS.items() if "aligned" not in preset.init_args]
