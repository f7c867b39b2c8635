"""``plan`` of a Hugging Face configuration without a LightningModule, of stock classifiers and of manual steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard.commands import plan as plan_command
from lightning_shard.errors import ConfigurationError
from lightning_shard.hugging_face import HuggingFace, HuggingFaceData, read_config
from tests.groups import sampled

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 96, "max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **TEXT},
    "BertForMaskedLM": {"model_type": "bert", **TEXT},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "d_model": 32,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "vocab_size": 96,
    },
    "ResNetForImageClassification": {
        "model_type": "resnet",
        "hidden_sizes": [8, 16, 32, 64],
        "depths": [1, 1, 1, 1],
        "embedding_size": 8,
    },
    "ViTForImageClassification": {"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8},
}


def write(folder: Path, name: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGS[name], "architectures": [name]}))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan_command.main([*arguments, "--device-memory", "80GB"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sampled(list(CONFIGS), 0))
def test_a_configuration_is_planned_as_its_architecture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, name)
    out = plan(capsys, path, "--devices=2", "--batch-size=3", "--seq-len=8")
    model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(path))
    count = sum(p.numel() for p in model.parameters())
    assert f"shard_fsdp, bf16-mixed, 1 x 2 devices, batch 3 per device: {count:,} parameters" in out
    assert "note:" not in out
    assert f"advice: use shard_ddp: {count:,} parameters with" in out
    model.config.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", 0)
    # A step with real values, of batches of the same form.
    module, data = HuggingFace(path), HuggingFaceData(path, batch_size=3, seq_len=8)
    module.configure_model()
    assert type(own := module.model) is type(model)
    module.configure_model()
    assert module.model is own
    assert model(**next(iter(data.train_dataloader()))).loss.isfinite()


@pytest.mark.matrix
def test_a_class_and_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "transformers.GPT2Config", "--task=token-classification", "--trainer.strategy=shard_ddp")
    assert "shard_ddp, bf16-mixed, 1 x 1 devices, batch 1 per device: 124," in out
    with pytest.raises(ConfigurationError, match="task is 'causal-lm', for which transformers has no model of T5"):
        plan_command.main(["transformers.T5Config", "--device-memory", "80GB"])


MISSING = "config is 'nope.json', which can't be read: there is no such file, nor folder (from "
NO_CONFIG = "which can't be read: Identity is no configuration of a model. Give a config.json"


@pytest.mark.parametrize(("model", "message"), sampled([("nope.json", MISSING), ("torch.nn.Identity", NO_CONFIG)], 0))
def test_what_is_no_configuration(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_command.main([model, "--device-memory", "80GB"])
    assert capsys.readouterr().err == ""  # whoever called it says it


def test_a_value_that_a_configuration_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(ConfigurationError, match=r"can.t be read: [^\0]*hidden_size"):
        read_config(str(tmp_path))


class Lazy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.LazyLinear(2)


def test_a_module_without_sizes() -> None:
    with pytest.raises(ConfigurationError, match=r"body.weight has no size before a first forward"):
        plan_command.main(["--device-memory=1GB", f"--model={__name__}.Lazy", "--trainer.strategy=shard_ddp"])


class Rows(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.zeros(64)] * 8, batch_size=4 // self.trainer.world_size)  # type: ignore[arg-type]


OWN = ["--data=tests.commands.test_plan_model.Rows", "--model"]


class Asks(pl.LightningModule):
    """Asks its run for a device, its length, rates, other ranks' values and a logger."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net, self.mean = nn.Linear(64, 64), MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        schedules, optimizer = self.lr_schedulers(), self.optimizers()
        out = self.net(batch) + torch.arange(64, device=self.device)
        loss = (out @ self.all_gather(out, sync_grads=True).flatten(0, 1).T).mean()
        self.mean(loss)
        self.log("mean", self.mean.compute() * optimizer.param_groups[0]["lr"] * schedules[1].get_last_lr()[0])
        if self.logger is not None:
            self.logger.log_metrics({})
        if not self.automatic_optimization:
            self.manual_backward(loss)
            optimizer.step()
            for schedule in schedules if self.trainer.is_last_batch else ():
                schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, schedules = torch.optim.SGD(self.parameters(), 0.1), torch.optim.lr_scheduler
        warm = schedules.LinearLR(optimizer, total_iters=self.trainer.estimated_stepping_batches // 10)
        rest = schedules.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return [optimizer], [{"scheduler": warm, "interval": "step"}, rest]


@pytest.mark.parametrize("manual", sampled(["false", "true"], 1))
def test_what_a_module_asks_of_its_run(manual: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*OWN, f"{__name__}.Asks", f"--model.manual={manual}", "--trainer.strategy=shard_ddp", "--devices=2"]
    out = plan(capsys, *arguments)
    assert "note:" not in out
    assert "1 x 2 devices, batch 2 per device" in out
    assert re.search(r"^activations +[1-9]", out, re.MULTILINE)
    assert not re.search(r"^optimizer ", out, re.MULTILINE), "SGD has no state"


class Labelled(Rows):
    def setup(self, stage: str) -> None:
        self.classes = 10


class Grown(pl.LightningModule):
    """Makes its layers in ``setup``, as wide as the data says."""

    def setup(self, stage: str) -> None:
        self.head = nn.Linear(64, self.trainer.datamodule.classes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.matrix
def test_layers_that_setup_makes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--model={__name__}.Grown", "--trainer.strategy=shard_ddp"]
    out = plan(capsys, f"--data={__name__}.Labelled", *arguments)
    assert "note:" not in out
    assert "batch 4 per device: 650 parameters" in out
    out = plan(capsys, f"--data={__name__}.Rows", *arguments, "--no-trace")
    assert "note: the module's setup fails, so its layers are not counted: AttributeError" in out


class Once(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("it is not run again")
        return super().forward(x)


class Few(pl.LightningModule):
    """Takes few rows, and blocks that no backward pass runs again."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.blocks = rows, nn.Sequential(*(Once(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(batch) > self.rows:
            raise ValueError(f"at most {self.rows} rows")
        for block in self.blocks:
            block.calls = 0
        return self.blocks(batch).mean()

    def configure_optimizers(self) -> Any:
        return None


def test_notes_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    own = [*OWN, f"{__name__}.Few", "--model.rows=4", "--trainer.strategy=shard_ddp", "--trainer.accelerator=cpu"]
    out = plan(capsys, *own, "--compare")
    assert "note: the largest batch is not known: at twice the batch, the step can't be traced without data, at " in out
    assert "(ValueError: at most 4 rows)" in out
    assert "note: the optimizer's state is taken as Adam's, two slots: configure_optimizers returns no optimizer" in out
    assert re.search(r"^not planned: shard_fsdp \+ checkpointing: .*\(ValueError: it is not run again\)", out, re.M)
    assert re.search(r"^shard_fsdp +\d", out, re.M)
