"""Frozen weights and what is trained beside them (LoRA, DoRA, adapters, heads): bitwise the same on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import full_tensor
from lightning_shard.registry import PRESETS, build
from tests.harness import run_distributed
from tests.models import VOCAB, Final, all_parameters, llama, quiet_trainer

FEW = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
ALIGNED = [name.removeprefix("shard_").removesuffix("_aligned") for name in PRESETS if name.endswith("_aligned")]
SAMPLES = 64


class LoRA(nn.Module):
    """A frozen layer, and beside it two small ones that read the same input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 3, bias=False), nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Tuned(pl.LightningModule):
    """Blocks of a frozen model in ``dtype`` with LoRA, and a head; ``low``: LoRA is loaded in ``dtype`` too."""

    def __init__(self, dtype: torch.dtype, low: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Linear(12, 12).to(dtype).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(LoRA(nn.Linear(12, 12)), LoRA(nn.Linear(12, 12))) for _ in range(2))
        for name, parameter in self.blocks.named_parameters():
            frozen = ".base." in name
            parameter.requires_grad_(not frozen).data = parameter.to(dtype if frozen or low else torch.float32)
        self.head = nn.Linear(12, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.backbone(batch[1])
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * x
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class WithPEFT(Tuned):
    """A Hugging Face model with an adapter of PEFT's."""

    def __init__(self, dtype: torch.dtype, **config: Any) -> None:
        import peft

        pl.LightningModule.__init__(self)
        torch.manual_seed(2)
        config = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False, **config}
        base = llama(tie_word_embeddings=False).to(dtype)
        self.model = peft.get_peft_model(base, peft.LoraConfig(**config), autocast_adapter_dtype=False)  # type: ignore

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


MODULES: dict[str, Callable[[torch.dtype], Tuned]] = {
    "lora": Tuned,
    "lora_low": lambda dtype: Tuned(dtype, low=True),
    "peft": WithPEFT,
    "peft_dora": lambda dtype: WithPEFT(dtype, use_dora=True),
    "peft_embedding": lambda dtype: WithPEFT(dtype, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "peft_head": lambda dtype: WithPEFT(dtype, modules_to_save=["lm_head"]),
}


class Watch(Final):
    """Keeps the gradients of the first step too, and the values at the start."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start, self.gradients = all_parameters(trainer), {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            self.gradients = {name: full_tensor(trainer, name, "gradient") for name in names}


def _fit(module: Tuned, name: str, precision: str) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    watch = Watch()
    strategy = build(f"shard_{name}_aligned", hooks_use_accessor=True)
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, callbacks=[watch])
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (SAMPLES, 8), generator=generator)
    data = TensorDataset(tokens, torch.randn(SAMPLES, 12, generator=generator))
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    trainer.fit(module, DataLoader(data, batch_size=4))
    moved = {n for n, value in watch.parameters.items() if not torch.equal(value, watch.start[n])}
    assert moved == trainable
    entries = trainer.strategy.ledger.entries
    columns = {n: {c: entries[n].column(c) for c in ("loaded", "gradient")} for n in trainable}
    frozen = {n: entries[n].column("loaded") for n in entries.keys() - trainable}
    return {
        "parameters": watch.parameters,
        "optimizer": watch.optimizer,
        "gradients": watch.gradients,
        "dtypes": columns | frozen,
        "after": {n: p.dtype for n, p in module.named_parameters()},
    }


def _wrong(kind: str, dtype: torch.dtype, names: list[str], precision: str) -> list[str]:
    """What differs from DDP, on this rank."""
    wrong = []
    expected = _fit(MODULES[kind](dtype), "ddp", precision)
    for name in names:
        found = _fit(MODULES[kind](dtype), name, precision)
        for part in ("gradients", "parameters", "optimizer"):
            assert found[part].keys() == expected[part].keys()
            same = {n: torch.equal(value, expected[part][n]) for n, value in found[part].items()}
            wrong += [f"{name}: {part} of {n}" for n, equal in same.items() if not equal]
            # Bytes of checkpoints.
            kinds = {n: value.dtype == expected[part][n].dtype for n, value in found[part].items()}
            wrong += [f"{name}: dtype of {part} of {n}" for n, equal in kinds.items() if not equal]
        for n, dtypes in found["dtypes"].items():
            wrong += [f"{name}: ledger of {n}"] if dtypes != expected["dtypes"][n] else []
    return wrong


def _check(kind: str, dtype: torch.dtype, names: list[str], precision: str) -> None:
    if kind.startswith("peft"):
        pytest.importorskip("peft")
    names = [name for name in names if name != "ddp" and "nvme" not in name]
    assert run_distributed(_wrong, 2, kind, dtype, names, precision, timeout=300) == [[], []]


@pytest.mark.parametrize(
    ("kind", "dtype", "precision"),
    [
        pytest.param("lora", torch.bfloat16, "32-true", marks=pytest.mark.matrix),
        pytest.param("lora_low", torch.bfloat16, "bf16-mixed", marks=pytest.mark.matrix),
        ("peft", torch.bfloat16, "bf16-mixed"),
    ],
)
def test_frozen_weights(kind: str, dtype: torch.dtype, precision: str) -> None:
    _check(kind, dtype, FEW, precision)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODULES)
def test_frozen_weights_under_every_name(kind: str, dtype: torch.dtype, precision: str) -> None:
    _check(kind, dtype, ALIGNED, precision)
