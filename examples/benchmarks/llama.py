"""A Llama-style model in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing in it knows how it is sharded. Its unit is `Block`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import Embedding, Linear, Rotary


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    key_heads: int
    """Heads of keys and values, each shared by ``heads / key_heads`` of the queries'."""
    hidden: int
    """Width inside of SwiGLU."""
    vocabulary: int = 256


SIZES = {
    "tiny": Size(layers=2, width=32, heads=4, key_heads=2, hidden=64),
    "5M": Size(layers=6, width=256, heads=8, key_heads=4, hidden=704),
    "25M": Size(layers=8, width=512, heads=8, key_heads=4, hidden=1408),
    "125M": Size(layers=20, width=768, heads=12, key_heads=4, hidden=2048),
    "350M": Size(layers=30, width=1024, heads=16, key_heads=8, hidden=2816),
    # Meta's Llama 3.2 1B and 3B and Llama 3.1 8B, with an output head of its own.
    "1B": Size(layers=16, width=2048, heads=32, key_heads=8, hidden=8192, vocabulary=128256),
    "3B": Size(layers=28, width=3072, heads=24, key_heads=8, hidden=8192, vocabulary=128256),
    "8B": Size(layers=32, width=4096, heads=32, key_heads=8, hidden=14336, vocabulary=128256),
}


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, size: Size, length: int, output_std: float) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.query = Linear(size.width, size.width)
        self.key = Linear(size.width, size.key_heads * self.head_width)
        self.value = Linear(size.width, size.key_heads * self.head_width)
        self.rotary = Rotary(self.head_width, length)
        self.output = Linear(size.width, size.width, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Mix along time: (batch, time, width) in and out."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, size: Size, output_std: float) -> None:
        super().__init__()
        self.gate = Linear(size.width, size.hidden)
        self.up = Linear(size.width, size.hidden)
        self.down = Linear(size.hidden, size.width, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm block, the shard unit of every engine."""

    def __init__(self, size: Size, length: int, output_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.attention = Attention(size, length, output_std)
        self.feed_forward_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.feed_forward = SwiGLU(size, output_std)

    def forward(self, x: Tensor) -> Tensor:
        """One layer: (batch, time, width) in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Decoder-only transformer."""

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        # GPT-2 (Radford et al. 2019, section 2.3): each of the 2 * layers residual additions is scaled down.
        output_std = 0.02 / math.sqrt(2 * size.layers)
        self.embedding = Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, length, output_std) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: int64 (batch, time) in, (batch, time, vocabulary) out."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
