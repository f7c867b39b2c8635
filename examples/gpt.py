"""A byte-level GPT as a LightningModule: nothing in it knows how it will be sharded.

The strategies find its shard units by themselves (the repeated ``Block``). Every module that owns parameters or
buffers has a ``reset_parameters`` that gives them their values, so that a model built on the meta device can be
materialised module by module.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics.text import Perplexity

VOCABULARY = 256


class Embedding(nn.Embedding):
    """``nn.Embedding`` that begins at N(0, 0.02) in place of N(0, 1)."""

    def reset_parameters(self) -> None:
        """Initialise the weight, float (entries, width)."""
        nn.init.normal_(self.weight, std=0.02)


class Linear(nn.Linear):
    """``nn.Linear`` without bias whose weight begins at N(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float = 0.02) -> None:
        self.std = std  # before the parent's __init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Initialise the weight, float (out, in)."""
        nn.init.normal_(self.weight, std=self.std)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split layout."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width = width
        self.length = length
        # Not persistent: the tables follow from the sizes, so a checkpoint need not hold them.
        self.register_buffer("cos", torch.empty(length, width // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, float (length, width / 2)."""
        # On the CPU and copied, so that the values are the same on every device.
        frequency = 10000.0 ** (-torch.arange(0, self.width, 2, device="cpu", dtype=torch.float32) / self.width)
        angle = torch.outer(torch.arange(self.length, device="cpu", dtype=torch.float32), frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys (batch, heads, time, width), with the same shape and dtype."""
        time = x.shape[-2]
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, length: int, output_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.rotary = Rotary(width // heads, length)
        self.output = Linear(width, width, std=output_std)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix along time, (batch, time, width). ``mask``: bool (batch, 1, time, time), True to attend."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, mask, is_causal=mask is None)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Pre-norm transformer block: the shard unit of this model."""

    def __init__(self, width: int, heads: int, length: int, output_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, length, output_std)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            Linear(width, 4 * width), nn.GELU(approximate="tanh"), Linear(4 * width, width, std=output_std)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One layer: (batch, time, width) in and out."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Decoder-only transformer over bytes."""

    def __init__(self, layers: int, heads: int, width: int, length: int, tie_embeddings: bool) -> None:
        super().__init__()
        # GPT-2 (Radford et al. 2019, section 2.3): each of the 2 * layers residual additions is scaled down.
        output_std = 0.02 / math.sqrt(2 * layers)
        self.embedding = Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, length, output_std) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, VOCABULARY)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte: int64 (batch, time) in, (batch, time, 256) out."""
        return self.head(self.features(tokens))

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The head's input, (batch, time, width). Without a mask each byte sees all before it."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def learning_rate_factor(step: int, *, warmup_steps: int, total_steps: float, final: float) -> float:
    """Factor of the peak learning rate at ``step``: linear warm-up, then a cosine down to ``final``.

    The first step is taken at ``1 / warmup_steps`` of the peak. With ``total_steps`` infinite (a run that only
    ``max_time`` ends) the rate stays at its peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(total_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


class GPT(LightningModule):
    """Byte-level GPT that trains with AdamW and a cosine schedule, and validates by perplexity.

    Args:
        layers: Number of transformer blocks.
        heads: Attention heads of each block.
        width: Width of the residual stream. Divided by ``heads`` it is an even number.
        max_length: Longest sequence in bytes.
        tie_embeddings: Whether the output head shares the embedding's weight.
        meta_init: Build on the meta device in ``configure_model``, so that no rank ever holds the whole model.
            For strategies that materialise meta-device modules.
        learning_rate: Peak learning rate.
        final_learning_rate: Learning rate at the end, as a fraction of the peak.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: AdamW's decay of the linear layers' weights. Embeddings and norms have none.
        beta1: AdamW's decay rate of the gradient's mean.
        beta2: AdamW's decay rate of the gradient's square.
    """

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        max_length: int = 128,
        tie_embeddings: bool = False,
        meta_init: bool = False,
        learning_rate: float = 4e-3,
        final_learning_rate: float = 0.1,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.95,
    ) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise ValueError(
                f"width={width} with heads={heads}: rotary positions need width / heads to be an even whole number."
                f" Use a width that is a multiple of {2 * heads}."
            )
        self.save_hyperparameters()
        self.val_perplexity = Perplexity()
        if not meta_init:
            self._build()

    def _build(self) -> None:
        h = self.hparams
        self.model = Transformer(h.layers, h.heads, h.width, h.max_length, h.tie_embeddings)

    def configure_model(self) -> None:
        """Build on the meta device under ``meta_init``. The Trainer calls it before each run."""
        if not hasattr(self, "model"):
            with torch.device("meta") if self.hparams.meta_init else nullcontext():
                self._build()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte: int64 (batch, time) in, (batch, time, 256) out."""
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy per byte, in nats."""
        inputs, targets = batch
        # In float32 whatever the compute dtype: a sum of exponentials is too coarse in 16 bits.
        loss = F.cross_entropy(self(inputs).float().flatten(0, 1), targets.flatten())
        # This rank's loss: averaging it over ranks would be one more collective in each step.
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the perplexity, which is reduced over all ranks at the end of the epoch."""
        inputs, targets = batch
        # float(): Perplexity takes a softmax and then its logarithm in the dtype it is given.
        self.val_perplexity.update(self(inputs).float(), targets)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Print the perplexity, with ``num_sanity_val_steps: -1`` the untrained model's too."""
        # The metric keeps its result: logging it afterwards is no second reduction.
        perplexity = self.val_perplexity.compute().item()
        step = f"step {self.global_step}: " if self.trainer.state.fn == TrainerFn.FITTING else ""
        self.print(f"{step}validation perplexity {perplexity:.4f}")

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW in two groups (with and without decay), and the schedule by optimizer step."""
        h = self.hparams
        # By the kind of module, not by the number of dims: an engine may hold a parameter in a flat form.
        linear = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        linear -= {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        parameters = list(self.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if id(p) in linear], "weight_decay": h.weight_decay},
                {"params": [p for p in parameters if id(p) not in linear], "weight_decay": 0.0},
            ],
            lr=h.learning_rate,
            betas=(h.beta1, h.beta2),
        )
        factor = partial(
            learning_rate_factor,
            warmup_steps=h.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            final=h.final_learning_rate,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
