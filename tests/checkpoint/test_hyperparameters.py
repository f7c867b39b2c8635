"""Hyperparameters as templates save them: configurations, enums and paths are plain, and the rest is named."""

from __future__ import annotations

import warnings
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch import nn

from lightning_shard import load_from_checkpoint
from lightning_shard.checkpoint.hyperparameters import plain_hyperparameters
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


class Kind(Enum):
    SMALL = 1


GIVEN: dict[str, Any] = {
    "lr": 0.1,
    "dtype": torch.bfloat16,
    "config": OmegaConf.create({"depth": 2, "width": "${depth}", "names": ["a"]}),
    "folder": Path("/data/train"),
    "kind": Kind.SMALL,
    "nested": {"paths": [Path("a"), Path("b")], Kind.SMALL: (1, None)},
    "net": nn.Linear(2, 2),
    "optimizer": partial(torch.optim.AdamW, lr=0.1),
    "layers": [{"act": torch.relu}],
}
PLAIN = {
    "lr": 0.1,
    "dtype": torch.bfloat16,
    "config": {"depth": 2, "width": 2, "names": ["a"]},
    "folder": "/data/train",
    "kind": "SMALL",
    "nested": {"paths": ["a", "b"], "SMALL": (1, None)},
}


def test_values_are_plain_and_what_can_not_be_saved_is_named() -> None:
    checkpoint = {"hyper_parameters": GIVEN, "hparams_type": type(GIVEN["config"]), "state_dict": {}}
    plain, left_out = plain_hyperparameters(checkpoint)
    assert plain == {"hyper_parameters": PLAIN, "state_dict": {}}
    assert left_out == ["net", "optimizer", "layers"]
    assert checkpoint["hyper_parameters"] is GIVEN


class Templated(TinyLM):
    def __init__(self, net: Any = None, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def _fit(folder: str) -> tuple[list[str], dict[str, Any]]:
    module, saves = Templated(net=nn.Linear(2, 2), config=GIVEN["config"]), ModelCheckpoint(folder, "one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy="shard_ddp", max_steps=1, enable_checkpointing=True, callbacks=[saves])
        trainer.fit(module, loader())
    said = [text for warning in caught if "without the hyperparameters" in (text := str(warning.message))]
    return said, dict(load_from_checkpoint(Templated, f"{folder}/one.ckpt", net=None).hparams)


def test_a_templates_fit_begins_and_says_once_what_a_reader_must_give(tmp_path: Path) -> None:
    (said, read), (none, _) = run_distributed(_fit, 2, str(tmp_path))
    assert len(said) == 1
    assert "without the hyperparameters net, which" in said[0]
    assert none == []
    assert read == {"net": None, "config": PLAIN["config"]}
