"""The example that trains a classifier from a Hugging Face encoder's weights, with a tiny encoder in MiniLM's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.classifier import TextClassifier, folder_of
from tests.groups import sampled
from tests.harness import ROOT, run_distributed
from tests.models import whole

CONFIG = str(ROOT / "configs" / "classifier.yaml")


def _fit(encoder: str, folder: str, strategy: str) -> dict[str, Any]:
    from lightning_shard import ShardCLI

    started: dict[str, Tensor] = {}

    class Watched(TextClassifier):
        def on_train_start(self) -> None:
            started.update({name: whole(tensor) for name, tensor in self.encoder.named_parameters()})

    short = {
        "trainer.strategy": strategy,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 1,
        "trainer.num_sanity_val_steps": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.default_root_dir": folder,
        "trainer.logger.init_args.save_dir": folder,
        "model.encoder": encoder,
        "data.init_args.encoder": encoder,
        "data.init_args.limit": 64,
        "data.init_args.batch_size": 4,
    }
    config = (
        Path(CONFIG).read_text().replace("  class_path: examples.classifier.TextClassifier\n  init_args:\n    ", "  ")
    )
    Path("config.yaml").write_text(config.replace("\n    lr:", "\n  lr:"))
    cli = ShardCLI(
        Watched, args=["fit", "--config", "config.yaml", *(f"--{key}={value}" for key, value in short.items())]
    )
    return {
        "started": started,
        "steps": cli.trainer.global_step,
        "accuracy": float(cli.trainer.callback_metrics["val_accuracy"]),
    }


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", sampled(["shard_fsdp_aligned", "shard_ddp"], 0))
def test_it_trains_from_the_folders_weights(encoder: Path, tmp_path: Path, strategy: str) -> None:
    from safetensors.torch import load_file

    expected = {k: v for k, v in load_file(encoder / "model.safetensors").items() if not k.startswith("pooler")}
    for result in run_distributed(_fit, 2, str(encoder), str(tmp_path), strategy, timeout=300):
        assert result["started"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(result["started"][name], tensor), name
        assert result["steps"] == 2
        assert 0 <= result["accuracy"] <= 1


def test_the_folder_of_a_package_or_a_message(encoder: Path) -> None:
    assert folder_of(str(encoder)) == encoder
    assert folder_of("transformers").name == "model"
    with pytest.raises(ValueError, match="neither a folder nor an installed package: pip install no-such-model"):
        folder_of("no_such_model")
