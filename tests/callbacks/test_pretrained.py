"""Pretrained weights under the Trainer: training begins with the unrounded values, on every engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_shard import (
    CheckpointError,
    ConfigurationError,
    full_tensor,
    load_pretrained,
)
from lightning_shard.callbacks.pretrained import PretrainedWeights
from tests.checkpoint.compare import assert_equal
from tests.harness import run_distributed
from tests.models import quiet_trainer


class Classifier(pl.LightningModule):
    """An encoder that begins with a file's values, on the meta device if asked to, and a new head."""

    def __init__(self, *, meta: bool, weights: str = "") -> None:
        super().__init__()
        self.meta, self.weights = meta, weights
        self.started: dict[str, Tensor] = {}
        self.ended: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "encoder"):
            with torch.device("meta" if self.meta else "cpu"):
                self.encoder = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7))
                self.head = nn.Linear(7, 2)

    def on_fit_start(self) -> None:
        if self.weights:
            load_pretrained(self.encoder, self.weights, rename={"old": "1"})

    def values(self) -> dict[str, Tensor]:
        """What is stepped of each parameter, and the buffers."""
        found = {name: full_tensor(self.trainer, f"encoder.{name}") for name, _ in self.encoder.named_parameters()}
        return found | {name: buffer.clone() for name, buffer in self.encoder.named_buffers()}

    def on_train_start(self) -> None:
        self.started = self.values()

    def on_train_end(self) -> None:
        self.ended = {name: self.values()[name] for name, _ in self.encoder.named_parameters()}

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        if index == 0 and self.global_step == 0:
            weight, bias = (self.started[f"0.{name}"] for name in ("weight", "bias"))
            expected = functional.linear(rows.float(), weight, bias).float()  # the step runs under autocast
            # A sum of four terms of about 1; values of bf16 have 8 bits.
            tolerance = 1e-6 if self.trainer.precision == "32-true" else 2**-5
            assert torch.allclose(self.encoder[0](rows).float(), expected, rtol=tolerance, atol=tolerance)
        return self.head(self.encoder(rows)).square().mean()

    def predict_step(self, rows: Tensor, index: int) -> Tensor:
        return self.encoder(rows).float()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def pretrained_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"0.weight": (7, 3), "0.bias": (7,), "old.weight": (7,), "old.bias": (7,)}
    shapes |= {"old.running_mean": (7,), "old.running_var": (7,)}
    values = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return values | {"old.num_batches_tracked": torch.tensor(7)}


def fit_classifier(strategy: str, precision: str, path: str, callback: bool) -> list[dict[str, Tensor]]:
    """What training began with: in a fit, in a second one, and in one that resumes."""
    data = DataLoader(torch.randn(8, 3), 2)
    module = Classifier(meta=True, weights="" if callback else path)
    callbacks = [PretrainedWeights(path, "encoder", {"old": "1"})] if callback else []

    def trainer(steps: int) -> pl.Trainer:
        return quiet_trainer(strategy=strategy, precision=precision, max_steps=steps, callbacks=callbacks)

    first = trainer(2)
    first.fit(module, data)
    found = [module.started]
    first.save_checkpoint("a.ckpt")
    saved = module.ended
    resumed = Classifier(meta=False, weights=module.weights)
    trainer(3).fit(resumed, data, ckpt_path="a.ckpt")
    assert all(torch.equal(resumed.started[name], tensor) for name, tensor in saved.items()), "the checkpoint wins"
    if callback:
        trainer(1).fit(module, data)
        assert all(torch.equal(module.started[name], tensor) for name, tensor in saved.items()), "trained values stay"
    return found


DEEPSPEED = [
    ("shard_deepspeed_stage_1_aligned", "bf16-mixed", False),
    ("shard_deepspeed_stage_2_offload", "bf16-mixed", False),
    ("shard_deepspeed_stage_3", "32-true", True),
    ("shard_deepspeed_stage_3_offload", "bf16-mixed", True),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "precision", "callback"),
    [
        ("shard_ddp", "32-true", False),
        ("shard_ddp", "bf16-mixed", True),
        ("shard_fsdp", "32-true", True),
        ("shard_fsdp_hybrid_aligned", "bf16-mixed", False),
        ("shard_fsdp_offload", "32-true", False),
        ("shard_deepspeed_stage_3_aligned", "bf16-mixed", False),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in DEEPSPEED),
    ],
)
def test_training_begins_with_the_unrounded_values(
    tmp_path: Path, strategy: str, precision: str, callback: bool
) -> None:
    expected = pretrained_values()
    path = str(tmp_path / "w.safetensors")
    save_file(expected, path)
    for (started,) in run_distributed(fit_classifier, 2, strategy, precision, path, callback):
        assert_equal(started, {name.replace("old", "1"): tensor for name, tensor in expected.items()})


def predict_with(path: str, name: str) -> Any:
    module = Classifier(meta=False)
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy="shard_fsdp", callbacks=[PretrainedWeights(path, name, {"old": "1"})])
    try:
        (rows,) = trainer.predict(module, DataLoader(torch.ones(2, 3), 1))
    except ConfigurationError as error:
        return str(error)
    return rows


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_on_its_own(tmp_path: Path) -> None:
    values = pretrained_values()
    path = str(tmp_path / "w.safetensors")
    save_file(values, path)
    reference = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7)).eval()
    reference.load_state_dict({name.replace("old", "1"): tensor for name, tensor in values.items()})
    for rows in run_distributed(predict_with, 2, path, "encoder"):
        # One row alone may be summed in another order than by a matrix product of several.
        torch.testing.assert_close(rows, reference(torch.ones(1, 3)).detach(), rtol=1e-6, atol=1e-6)
    for message in run_distributed(predict_with, 2, path, "encoders"):
        assert re.search(
            r"module is 'encoders', which \w*Classifier does not have. Its submodules are encoder", message
        )


class OnMeta(Classifier):
    def configure_model(self) -> None:
        super().configure_model()
        load_pretrained(self.encoder, self.weights, rename={"old": "1"})


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    save_file(pretrained_values(), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"is on the meta device .* in on_fit_start"):
        OnMeta(meta=True, weights=str(tmp_path / "w.safetensors")).configure_model()
    module = OnMeta(meta=False, weights=str(tmp_path / "w.safetensors"))
    module.configure_model()
    assert torch.equal(module.encoder[0].weight, pretrained_values()["0.weight"])
