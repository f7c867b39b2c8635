"""Frozen weights and what is trained beside them (LoRA, DoRA, adapters, heads): bitwise the same on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.registry import PRESETS
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import VOCAB, Final, llama, quiet_trainer

PRECISIONS = ["32-true", "bf16-mixed"]
FEW = ["fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
ALIGNED = [
    name.removeprefix("shard_").removesuffix("_aligned")
    for name in PRESETS
    if name.endswith("_aligned") and "ddp" not in name and "nvme" not in name
]
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
    "peft": lambda dtype: WithPEFT(dtype, modules_to_save=["lm_head"]),
}


def _fit(module: Tuned, name: str, precision: str) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    final = Final()
    trainer = quiet_trainer(strategy=f"shard_{name}_aligned", precision=precision, max_steps=4, callbacks=[final])
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (SAMPLES, 8), generator=generator)
    data = TensorDataset(tokens, torch.randn(SAMPLES, 12, generator=generator))
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    trainer.fit(module, DataLoader(data, batch_size=4))
    assert trainable == {n for n, p in final.parameters.items() if not torch.equal(p.float(), start[n].float())}
    return {**final.parameters, **final.optimizer}


def _wrong(kind: str, dtype: torch.dtype, names: list[str], precision: str) -> dict[str, list[str]]:
    """Tensors that differ from DDP's in a bit or, as checkpoints would have them, in dtype."""
    expected = _fit(MODULES[kind](dtype), "ddp", precision)
    wrong = {}
    for name in names:
        found = _fit(MODULES[kind](dtype), name, precision)
        assert found.keys() == expected.keys()
        same = {n: value.dtype == found[n].dtype and torch.equal(value, found[n]) for n, value in expected.items()}
        wrong[name] = [n for n, equal in same.items() if not equal]
    return {name: tensors for name, tensors in wrong.items() if tensors}


CASES = [(kind, dtype, p) for kind in MODULES for dtype in (torch.float32, torch.bfloat16) for p in PRECISIONS]


@pytest.mark.parametrize(
    ("kind", "dtype", "precision"), sampled(CASES, CASES.index(("peft", torch.bfloat16, "bf16-mixed")))
)
def test_frozen_weights(kind: str, dtype: torch.dtype, precision: str) -> None:
    if kind.startswith("peft"):
        pytest.importorskip("peft")
    names = ALIGNED if (kind, dtype, precision) != ("peft", torch.bfloat16, "bf16-mixed") else FEW
    assert run_distributed(_wrong, 2, kind, dtype, names, precision, timeout=300) == [{}, {}]
