"""A LightningModule and random data for a Hugging Face configuration, to plan and measure without own code."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_shard.errors import ConfigurationError

Task = Literal[
    "causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification", "image-classification"
]
# End of a model's class name.
_SUFFIXES: Mapping[str, Task] = {
    "ForCausalLM": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSeq2SeqLM": "seq2seq-lm",
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForConditionalGeneration": "seq2seq-lm",
}
_LONGEST = 2048  # Tokens of a sample if neither ``seq_len`` nor a smaller ``max_position_embeddings`` is given.


def read_config(config: str) -> Any:
    """Read a ``config.json``, its folder, or a class path (with its defaults)."""
    from transformers import AutoConfig, PretrainedConfig

    path, (module, _, name) = Path(config), config.rpartition(".")
    try:
        if not path.exists() and (path.suffix == ".json" or not module.replace(".", "").isidentifier()):
            raise FileNotFoundError(f"there is no such file, nor folder (from {Path.cwd()})")
        found = AutoConfig.from_pretrained(path) if path.exists() else getattr(importlib.import_module(module), name)()
        if not isinstance(found, PretrainedConfig):
            raise TypeError(f"{type(found).__name__} is no configuration of a model")
        return found
    except Exception as error:  # any error of a configuration class
        raise ConfigurationError(
            f"config is {config!r}, which can't be read: {error}. Give a config.json of transformers, the folder that "
            "it is in, or a class: transformers.LlamaConfig. A run's own file is given as --config."
        ) from error


def task_of(config: Any) -> Task:
    """Task of the configuration's ``architectures``. Default: a causal language model."""
    named = (task for name in config.architectures or () for end, task in _SUFFIXES.items() if name.endswith(end))
    return next(named, "causal-lm")


class HuggingFace(LightningModule):
    """A model of transformers with its own loss and AdamW, built on the meta device with random weights."""

    def __init__(self, config: str, task: Task | None = None, lr: float = 2e-5) -> None:
        """Read the configuration.

        Args:
            config: a ``config.json``, the folder that it is in, or a class such as ``transformers.LlamaConfig``.
            task: task of the model. Default: from the configuration's ``architectures``, else ``causal-lm``.
            lr: learning rate of AdamW.

        Raises:
            ConfigurationError: ``config`` can't be read.
        """
        super().__init__()
        self.save_hyperparameters()
        self._config = read_config(config)

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        import transformers

        task = self.hparams["task"] or task_of(self._config)
        suffix = next(end for end, known in _SUFFIXES.items() if known == task)
        self._config.use_cache = False
        if task == "seq2seq-lm" and getattr(self._config, "decoder_start_token_id", None) is None:
            # T5's files set it to the padding token. The class has no default.
            self._config.decoder_start_token_id = self._config.pad_token_id or 0
        if task == "sequence-classification" and self._config.num_labels > 1:
            # transformers' own default. With it DeBERTa does not look for labels below 0.
            self._config.problem_type = self._config.problem_type or "single_label_classification"
        try:
            with torch.device("meta"):
                self.model = getattr(transformers, f"AutoModel{suffix}").from_config(self._config)
        except ValueError as error:
            kind = type(self._config).__name__
            raise ConfigurationError(
                f"task is {task!r}, for which transformers has no model of {kind}. Others: "
                f"{', '.join(known for known in get_args(Task) if known != task)}; or write a LightningModule."
            ) from error

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss of a batch of `HuggingFaceData`."""
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams["lr"])


class _Drawn(Dataset[dict[str, Tensor]]):
    """Random samples of the task's form. The index seeds a sample, so that it is the same on every rank."""

    def __init__(self, config: Any, task: Task, seq_len: int, count: int) -> None:
        self.config, self.task, self.seq_len, self.count = config, task, seq_len, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config, draw = self.config, torch.Generator().manual_seed(index)
        label = torch.randint(max(2, config.num_labels), (), generator=draw)
        if self.task == "image-classification":
            size = getattr(config, "image_size", 224)  # ImageNet's size, for networks that take any.
            sizes = size if isinstance(size, list | tuple) else [size] * 2
            return {"pixel_values": torch.randn(config.num_channels, *sizes, generator=draw), "labels": label}
        ids = torch.randint(config.get_text_config().vocab_size, (self.seq_len,), generator=draw)
        if self.task == "sequence-classification":
            return {"input_ids": ids, "labels": label}
        return {"input_ids": ids, "labels": ids % config.num_labels if self.task == "token-classification" else ids}


class HuggingFaceData(LightningDataModule):
    """Random batches for `HuggingFace`, to measure speed and memory."""

    def __init__(
        self,
        config: str,
        task: Task | None = None,
        batch_size: int = 1,
        seq_len: int | None = None,
        samples: int = 100_000,
    ) -> None:
        """Keep the arguments.

        Args:
            config: as for `HuggingFace`.
            task: as for `HuggingFace`.
            batch_size: samples of a batch of one process.
            seq_len: tokens of a sample. Default: the model's ``max_position_embeddings``, at most 2048.
            samples: size of the data set.
        """
        super().__init__()
        self.save_hyperparameters()

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled batches: ``input_ids`` int64 (batch, seq_len), or ``pixel_values``, and ``labels``."""
        h, config = self.hparams, read_config(self.hparams["config"])
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or _LONGEST
        seq_len, task = h["seq_len"] or min(longest, _LONGEST), h["task"] or task_of(config)
        drawn = _Drawn(config, task, seq_len, h["samples"])
        return DataLoader(drawn, h["batch_size"], shuffle=True, drop_last=True)
