"""What `EMACallback` is given, and what of Lightning's it takes the place of."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_shard import ConfigurationError, EMACallback
from lightning_shard.checkpoint.files.manifest import FORMAT_VERSION
from lightning_shard.checkpoint.load import open_portable
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.test_versions import FOLDER, Saved, batches
from tests.harness import run_distributed
from tests.models import quiet_trainer


def _alone(strategy: str, callback: pl.Callback) -> pl.Trainer:
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    return pl.Trainer(strategy=strategy, callbacks=[callback], accelerator="cpu", devices=1, **flags)


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("kind", [EMAWeightAveraging, WeightAveraging, partial(StochasticWeightAveraging, 0.1)])
def test_lightnings_callbacks_are_refused_with_the_one_to_use(kind: Any, stage: str) -> None:
    trainer = _alone("shard_ddp", callback := kind())
    with pytest.raises(ConfigurationError) as error:
        getattr(trainer, stage)(BoringModel(), datamodule=BoringDataModule())
    said = str(error.value)
    assert said.startswith(f"{type(callback).__name__} copies the whole module")
    assert "use lightning_shard.EMACallback" in said


def test_the_callback_needs_a_strategy_of_this_package() -> None:
    trainer = _alone("auto", EMACallback())
    with pytest.raises(ConfigurationError, match="the Trainer has SingleDeviceStrategy: use shard_ddp"):
        trainer.fit(BoringModel(), datamodule=BoringDataModule())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decay": 1.5}, "decay of EMACallback is 1.5, but must be from 0 to 1, or equal"),
        ({"update_every_n_steps": 0}, "update_every_n_steps of EMACallback is 0, but must be 1 or more"),
        ({"avg_fn": None}, "EMACallback has no argument 'avg_fn'"),
    ],
)
def test_arguments_that_are_none(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        EMACallback(**given)


def _saved_again(path: Path) -> dict[str, Any]:
    trainer = quiet_trainer(strategy="shard_ddp", callbacks=[EMACallback(decay=0.7)], max_steps=3)
    trainer.fit(Saved(), batches(count=40), ckpt_path=path)
    trainer.save_checkpoint("again.ckpt")
    found = open_portable("again.ckpt").trainer_state
    averages = {key: tensor for key, tensor in stored(Path("again.ckpt")).items() if key.startswith("average.")}
    return {"averages": averages, "count": int(found["averaging_state"]["n_averaged"]), "states": found["callbacks"]}


def test_the_average_of_lightnings_callback_in_an_older_directory_goes_on() -> None:
    path = FOLDER / f"version_{FORMAT_VERSION}/fsdp.ckpt"
    assert "EMAWeightAveraging" in open_portable(path).trainer_state["callbacks"]
    (found,) = run_distributed(_saved_again, 1, path)
    assert (found["count"], found["states"]["EMAWeightAveraging"]) == (3, {"latest_update_step": 3})
    assert_equal(found["averages"], {key: t for key, t in stored(path).items() if key.startswith("average.")})
