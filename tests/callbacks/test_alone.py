"""The callbacks in a process alone under the Trainer's own strategy, where there is no process group."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_shard import ConfigurationError
from lightning_shard.callbacks import BatchSizeCallback, MemoryCallback, ProfilerCallback, RunPageCallback
from lightning_shard.callbacks.profiler import communication
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.meters.memory_account import StepMeter
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


class Summing(Alone):
    """Steps nothing in this run."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


def test_a_fit_without_a_step_leaves_no_meter() -> None:
    memory = MemoryCallback()
    fit(Summing(), memory, max_steps=-1, max_epochs=1, limit_train_batches=2)
    assert memory.measured is None
    assert memory._meter is None


class Adversaries(Summing):
    """Steps twice in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            super().training_step(batch, batch_idx)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.blocks, self.head)]


@pytest.mark.parametrize(("steps", "traced"), [([2], 2), ([3], 2), ([2, 3], 4)])
def test_a_trace_has_the_batches_of_the_chosen_steps(steps: list[int], traced: int, tmp_path: Path) -> None:
    profiler = ProfilerCallback(steps, folder=str(tmp_path))
    fit(Adversaries(), profiler, max_steps=6)
    with gzip.open(profiler.files[0]) as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#SGD") for name in names) == traced


class Broken(SingleDeviceStrategy):
    """Of a strategy whose arithmetic does not know something."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.memory = self

    def step_meter(self) -> StepMeter:
        return StepMeter(self.lightning_module, list, device=self.root_device)

    def predicted(self, optimizers: Any) -> Any:
        raise KeyError("a kind")

    advice = predicted


class Greedy(Alone):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + torch.empty(1 << 50).sum()


def test_what_the_account_lacks_does_not_hide_the_error() -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(Greedy(), MemoryCallback(), strategy=Broken(), accelerator="auto", devices="auto")
    message = str(raised.value)
    assert "can't allocate memory" in message.splitlines()[0]
    assert message.endswith("(MemoryCallback has no account: KeyError: 'a kind')")


@pytest.mark.parametrize("given", [{"margin": 1.0}, {"largest": 0}, {"limit": 0}])
def test_numbers_that_can_not_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="margin must be from 0 to below 1, and the others 1 or more"):
        BatchSizeCallback(**given)


def test_a_batch_size_needs_the_account_of_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match="needs a strategy of lightning_shard, such as shard_fsdp"):
        fit(Alone(), BatchSizeCallback(limit=10))
