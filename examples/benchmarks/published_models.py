"""The models of published runs, as their own code builds and checkpoints them, without weights or training.

`Llama` follows torchtitan's ``models/llama/model.py`` (commit 9dec370) and the recomputation of its
``parallelize_llama.py``, `MPT` llm-foundry's ``models/mpt/modeling_mpt.py`` (commit 5e85bd62d). Models of Hugging Face
are built by ``transformers`` from their configurations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "op", "full"]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size, self.repeated = width // heads, heads // kv_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (self._for_all_heads(part) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().flatten(2))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        if self.repeated == 1:
            return x
        return x.unsqueeze(3).expand(*x.shape[:3], self.repeated, self.size).reshape(*x.shape[:2], -1, self.size)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """In complex fp32, as torchtitan rotates."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, recompute: Recompute) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, kv_heads), FeedForward(width, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.recompute = recompute

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.recompute == "none":
            return self._forward(x, angles)
        options: dict[str, Any] = {"context_fn": every_second_product} if self.recompute == "op" else {}
        return checkpoint(self._forward, x, angles, use_reentrant=False, preserve_rng_state=False, **options)

    def _forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def every_second_product() -> Any:
    """The operators saved under torchtitan's ``selective_ac_option = 'op'``: attention, every second product."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = operator == torch.ops.aten.mm.default
        products[context.is_recompute] += product
        saved = operator in _ATTENTION or (product and products[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        vocabulary: int,
        length: int,
        kv_heads: int | None = None,
        recompute: Recompute = "none",
        share: float = 1.0,
        chunks: int = 1,
        full_logits: bool = False,
    ) -> None:
        super().__init__()
        # ``share``: the part of the blocks under ``recompute``, spaced as by fms-fsdp's ``policies/ac_handler.py``.
        # The number of parts of the loss, and whether the model itself makes logits fp32, which all live to the end.
        self.chunks, self.full_logits = chunks, full_logits
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        chosen = [int((i + 1) * share + 0.5) > int(i * share + 0.5) for i in range(layers)]
        again: list[Recompute] = [recompute if own else "none" for own in chosen]
        blocks = (Block(width, heads, kv_heads or heads, hidden, each) for each in again)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer(
            "angles", torch.zeros(length, width // heads // 2, dtype=torch.complex64), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = self.output(self.norm(x))
        return logits.float() if self.full_logits else logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Torchtitan's ``train.py``: logits are made fp32, and freed ahead of backward."""
        logits = self(tokens)
        if self.full_logits:
            self.logits = logits  # As the name in the training loop, which outlives backward.
            return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        if self.chunks == 1:
            return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        # Its ``components/loss.py`` of March 2025.
        parts = zip(logits.chunk(self.chunks, dim=1), tokens.chunk(self.chunks, dim=1), strict=True)
        losses = [functional.cross_entropy(x.flatten(0, 1).float(), y.flatten()) for x, y in parts]
        return torch.stack(losses).mean()


class MPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, recompute: bool) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.recompute else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.wqkv(self.norm_1(x)).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class FusedCrossEntropy(torch.autograd.Function):
    """FlashAttention's: one kernel reads the logits, another writes their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.mean(dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits * 2


class MPT(nn.Module):
    """With learned positions, biases, and the embedding as output."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50368, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(MPTBlock(width, heads, recompute) for _ in range(layers))
        self.norm_f = nn.LayerNorm(width)

    def loss(self, tokens: Tensor) -> Tensor:
        self._metrics(tokens)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        # Composer's state has them until the next forward.
        self.logits = functional.linear(self.norm_f(x), self.wte.weight).flatten(0, 1)
        return FusedCrossEntropy.apply(self.logits)

    def _metrics(self, tokens: Tensor) -> None:
        """Composer's two of each batch, in fp32 by autocast: after backward, which leaves as little as is here."""
        self.logits = self.wte.weight.new_empty(tokens.numel(), 50368)
        with torch.no_grad():
            for _ in range(2):
                functional.cross_entropy(self.logits.float(), tokens.flatten())


class OfTransformers(nn.Module):
    """A model of Hugging Face that computes its own loss, of as many tokens as the run had."""

    def __init__(self, kind: str, config: str, *, attention: str = "eager", **sizes: Any):
        super().__init__()
        configuration = getattr(transformers, config)(**sizes)
        configuration._attn_implementation = attention
        self.model = getattr(transformers, kind)(configuration)
        self.classifies, self.both = "Classification" in kind, "Conditional" in kind

    def loss(self, tokens: Tensor) -> Tensor:
        if self.classifies:
            logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
            return functional.cross_entropy(logits, tokens[:, 0])
        if self.both:
            # Half as many tokens are answered.
            asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            return self.model(**asked, labels=tokens[:, : tokens.shape[1] // 2].contiguous()).loss
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
