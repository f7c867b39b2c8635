"""Modules that know nothing of this package run under every name: Lightning's demos and Hugging Face models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.registry import PRESETS
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import Final, all_parameters, llama, quiet_trainer

# Without stage 0, which is DDP, and NVMe, which needs compiled kernels.
NAMES = [name for name in PRESETS if "stage_0" not in name and "nvme" not in name]
FEW = ["shard_ddp_aligned", "shard_fsdp", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3_aligned"]
STEPS = 6
VOCAB = 61


class NoDownload(pl.LightningDataModule):
    """Random tokens in the place of the text that the demos would download."""

    def __init__(self, length: int = 12, batch_size: int = 4) -> None:
        super().__init__()
        tokens = torch.randint(0, VOCAB, (64, length + 1), generator=torch.Generator().manual_seed(5))
        self.data, self.batch_size = TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    predict_dataloader = train_dataloader


class DemoTransformer(LightningTransformer):
    def prepare_data(self) -> None:
        """The demo's would download."""


class CausalLM(pl.LightningModule):
    """Any Hugging Face causal language model, with what its documentation has in a training loop and no more."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build = build

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model.generate(batch[0], max_new_tokens=2, do_sample=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def small_llama() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
    return llama(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # It ties its embeddings by default.
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "boring": BoringModel,
    "manual": ManualOptimBoringModel,
    "transformer": lambda: DemoTransformer(vocab_size=VOCAB),
    "llama": lambda: CausalLM(small_llama),
    "gpt2": lambda: CausalLM(gpt2),
}
DATA = dict.fromkeys(("transformer", "llama", "gpt2"), NoDownload)


class Watch(pl.Callback):
    """Keeps losses and batches, whatever the module itself logs."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.batches: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = all_parameters(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append((outputs["loss"] if isinstance(outputs, dict) else outputs).item())
        self.batches.append(str(batch))


def fit(model: str, name: str, precision: str) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module, watch, final = MODELS[model](), Watch(), Final()
    data = DATA.get(model, lambda: None)()
    trainer = quiet_trainer(
        strategy=name, precision=precision, max_steps=STEPS, limit_val_batches=2, callbacks=[watch, final]
    )
    trainer.fit(module, data)
    result = {
        "steps": trainer.global_step,
        "start": watch.start,
        "losses": watch.losses,
        "batches": watch.batches,
        "parameters": final.parameters,
        "tied": sum(1 for _ in module.named_parameters(remove_duplicate=False)) - len(watch.start),
    }
    if model in ("boring", "llama", "gpt2"):
        # The trained module goes on in other loops of the same Trainer.
        trainer.limit_predict_batches = 2
        result["predictions"] = trainer.predict(module, data)
    if model == "boring":
        trainer.test(module, verbose=False)
    return result


def fit_all(model: str, names: list[str], precision: str) -> dict[str, dict[str, Any]]:
    return {name: fit(model, name, precision) for name in names}


def check(model: str, names: list[str], precision: str) -> None:
    ranks = run_distributed(fit_all, 2, model, names, precision, timeout=300)
    for name in names:
        for rank in ranks:
            check_run(rank[name], model)
        for one, other in itertools.combinations((rank[name] for rank in ranks), 2):
            assert not set(one["batches"]) & set(other["batches"])
            assert different(one["parameters"], other["parameters"]) == []
    for rank in ranks:
        for name in names[1:]:
            # Plain names differ from aligned ones only in the low-memory precisions.
            for part in ("start", "parameters"):
                assert different(rank[names[0]][part], rank[name][part]) == [], (name, part)
            assert rank[name]["losses"] == rank[names[0]]["losses"]
            assert str(rank[name].get("predictions")) == str(rank[names[0]].get("predictions"))


def check_run(run: dict[str, Any], model: str) -> None:
    assert run["steps"] == STEPS
    assert len(run["losses"]) == len(run["batches"]) == STEPS
    assert all(math.isfinite(loss) for loss in run["losses"])
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in run["parameters"].values())
    assert len(different(run["start"], run["parameters"])) >= 0.9 * len(run["parameters"])
    assert run["tied"] == (1 if model in ("llama", "gpt2") else 0)
    if "predictions" in run:
        assert len(run["predictions"]) == 2


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


CASES = [("manual", "bf16-mixed", FEW), *((model, p, NAMES) for model in MODELS for p in ("32-true", "bf16-mixed"))]


@pytest.mark.parametrize(("model", "precision", "names"), sampled(CASES, 0))
def test_unmodified_modules_run_and_get_the_same_numbers(model: str, precision: str, names: list[str]) -> None:
    check(model, names, precision)
