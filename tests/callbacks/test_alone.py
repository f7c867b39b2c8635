"""The callbacks in a process alone under the Trainer's own strategy, where there is no process group."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_shard import ConfigurationError
from lightning_shard.callbacks import BatchSizeCallback, MemoryCallback, ProfilerCallback, RunPageCallback
from lightning_shard.callbacks.profiler import communication
from lightning_shard.callbacks.throughput import ThroughputCallback
from tests.models import TinyLM, loader

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Alone(TinyLM):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return loader(self.batch_size)


def fit(module: TinyLM, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    quiet = {"accelerator": "cpu", "devices": 1, "max_steps": 4, **dict.fromkeys(OFF, False)}
    trainer = pl.Trainer(**{**quiet, **settings}, callbacks=list(callbacks))
    trainer.fit(module)
    return trainer


def test_meters(tmp_path: Path) -> None:
    throughput, memory = ThroughputCallback(every_n_steps=2, peak_tflops=1.0), MemoryCallback()
    page, profiler = RunPageCallback(str(tmp_path / "a.html"), 2), ProfilerCallback([2], folder=str(tmp_path))
    module = Alone()
    module.lock = threading.Lock()
    fit(module, throughput, memory, page, profiler)
    assert [(window.step, window.devices) for window in throughput.windows] == [(2, 1), (4, 1)]
    assert throughput.flops.why_not == "it can't be copied (TypeError: cannot pickle '_thread.lock' object)"
    assert memory.measured == memory.ranks[0]
    assert [step for step, _ in page.metrics["train_loss"]] == [2, 4], "in mid-epoch too"
    assert [path.name for path in profiler.files] == ["rank0-steps2-2.json.gz"]
    assert communication([]) is None


@pytest.mark.parametrize("given", [{"margin": 1.0}, {"largest": 0}, {"limit": 0}])
def test_numbers_that_can_not_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="margin must be from 0 to below 1, and the others 1 or more"):
        BatchSizeCallback(**given)


def test_a_batch_size_needs_the_account_of_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match="needs a strategy of lightning_shard, such as shard_fsdp"):
        fit(Alone(), BatchSizeCallback(limit=10))
