"""Small LightningModules and runs of them that the distributed tests share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_shard import full_tensor
from lightning_shard.tensors.full import full_of

VOCAB = 37


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """``count`` fixed random sequences; item ``i`` is the same on every rank and in every run."""

    def __init__(self, count: int = 256, length: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randint(0, VOCAB, (count, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index, :-1], self.data[index, 1:]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # odd: does not divide evenly over ranks
        self.down = nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        # A buffer that bf16 can't represent.
        self.register_buffer("scale", torch.tensor(1.0 + 2.0**-12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden)) * self.scale.to(x.dtype)


class TinyLM(pl.LightningModule):
    """Embedding, residual blocks and a head; a parameter on the module itself, a frozen one, and optionally a tie."""

    def __init__(
        self,
        width: int = 12,
        depth: int = 3,
        *,
        tie: bool = False,
        dropout: float = 0.0,
        lr: float = 1e-2,
        dtype: torch.dtype = torch.float32,
        meta: bool = False,
        seed: int = 7,
    ) -> None:
        super().__init__()
        self.width, self.depth, self.tie, self.dropout = width, depth, tie, dropout
        self.lr, self.load_dtype, self.meta, self.seed = lr, dtype, meta, seed
        self.seen: list[float] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        if not self.meta:
            torch.manual_seed(self.seed)
        with torch.device("meta" if self.meta else "cpu"):
            self.embed = nn.Embedding(VOCAB, self.width)
            self.blocks = nn.ModuleList(Block(self.width, self.dropout) for _ in range(self.depth))
            self.head = nn.Linear(self.width, VOCAB, bias=False)
            if self.tie:
                self.head.weight = self.embed.weight
        if self.load_dtype != torch.float32:
            for parameter in self.parameters():
                parameter.data = parameter.data.to(self.load_dtype)
        self.frozen = nn.Parameter(torch.full((self.width,), 0.5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(self.width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.frozen + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].float().sum().item())
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def llama(**config: Any) -> nn.Module:
    """A tiny Llama of Hugging Face; `config` is laid over its sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **config}))


def loader(batch_size: int = 4, *, count: int = 256, shuffle: bool = True, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Tokens(count), batch_size=batch_size, shuffle=shuffle, **kwargs)


def quiet_trainer(**kwargs: Any) -> pl.Trainer:
    """A Trainer on CPU without output; its processes are the harness' own."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 100,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, gathered if it is cut. All ranks call it."""
    return (full_of(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def all_parameters(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What the optimizer steps of each parameter, or the parameter, whole, on every engine. All ranks call it."""
    return {name: full_tensor(trainer, name) for name, _ in trainer.lightning_module.named_parameters()}


class Final(pl.Callback):
    """Keeps the whole parameters and optimizer state of a fit's end, before the engine lets go of them."""

    SLOTS = ("step", "exp_avg", "exp_avg_sq")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = all_parameters(trainer)
        state = {f"{n}.{slot}": full_tensor(trainer, n, slot) for n in self.parameters for slot in self.SLOTS}
        self.optimizer = {key: value for key, value in state.items() if value is not None}
