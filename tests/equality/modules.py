"""Modules of the kinds that break sharding, each with batches of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, LENGTH = 23, 16, 6


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Residual blocks; a subclass changes one thing."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if self.tied:
            self.head.weight = self.embed.weight

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens), tokens))


class Tied(Blocks):
    tied = True


class UsedTwice(Blocks):
    """As an encoder and decoder that share a block."""

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


class Normed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return super().middle(x, tokens)


class Experts(Blocks):
    """Each token goes to one of the blocks; every block sees some on every rank."""

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        chosen = [(tokens % len(self.blocks) == index).unsqueeze(-1) for index in range(len(self.blocks))]
        return sum(torch.where(here, block(x), x * 0) for here, block in zip(chosen, self.blocks, strict=True))  # type: ignore[return-value]


class Flow(Blocks):
    """Leaves a block out in every other step, the same on all ranks, and loops over another."""

    steps = 0

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.steps += 1
        x = self.blocks[0](x)
        if self.steps % 2:
            x = self.blocks[1](x)
        return self.blocks[2](x)


class Lora(Blocks):
    """Low-rank matrices beside frozen ones in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.bfloat16()
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in self.blocks)
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in self.blocks)

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        return x


class Wide(Blocks):
    """Has weights of as many elements as optimizers with block-wise states quantise: 4,096 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 512, bias=False), nn.Linear(512, WIDTH, bias=False)

    def middle(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().middle(x + self.down(functional.gelu(self.up(x))), tokens)


def _hugging_face(name: str, **config: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 37, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16, **config}
    return getattr(transformers, name)(getattr(transformers, f"{name.partition('For')[0]}Config")(**sizes)).train()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = _hugging_face("LlamaForCausalLM", num_key_value_heads=1, tie_word_embeddings=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = _hugging_face("BertForMaskedLM", **drop)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class Clip(nn.Module):
    """Two towers and a temperature of no dimension; its logits stand for the classes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        sizes = {"hidden_size": WIDTH, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "eos_token_id": VOCAB - 1}
        vision = {**sizes, "image_size": 8, "patch_size": 4}
        self.model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).train()

    def forward(self, tokens: Tensor) -> Tensor:
        pixels = tokens[:, :1, None, None].float().expand(-1, 3, 8, 8) / VOCAB
        return self.model(input_ids=tokens, pixel_values=pixels).logits_per_text


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Lstm,
    "a block used twice": UsedTwice,
    "LoRA on frozen bf16": Lora,
    "tied weights": Tied,
    "BatchNorm": Normed,
    "experts": Experts,
    "control flow": Flow,
    "Llama": Decoder,
    "BERT": Encoder,
    "CLIP": Clip,
    "wide": Wide,
}


class Model(pl.LightningModule):
    """Trains one of `MODULES` with an optimizer that ``make`` makes of its parameters."""

    def __init__(self, module: str, make: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.module, self.make = MODULES[module](), make

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.module(tokens)
        if logits.ndim == 2:  # of pairs
            return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.requires_grad])
