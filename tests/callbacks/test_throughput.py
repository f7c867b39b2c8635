"""Throughput: what is counted, over which time, and on which ranks."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.meters.throughput_windows import (
    RankWindow,
    Window,
    batch_size,
    combine,
    summary_table,
    window_line,
)
from tests.harness import run_distributed

TOKENS = torch.zeros(4, 8, dtype=torch.int64)


MASK = torch.tensor([[1] * 5 + [0] * 3] * 4)
LABELS = torch.where(MASK > 0, TOKENS, -100)
OTHER_FIRST = {"a": torch.zeros(4, 3, dtype=torch.int64), "b": TOKENS, "c": MASK}


@pytest.mark.parametrize(
    ("batch", "keys", "expected"),
    [
        (TOKENS, {}, (4, 32, None)),
        ((TOKENS, LABELS), {}, (4, 32, 20)),
        ({"text": ["a", "b"], "labels": torch.zeros(9, 9, dtype=torch.int64), "input_ids": TOKENS}, {}, (4, 32, None)),
        ({"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS}, {}, (4, 32, 20)),
        ({"input_ids": TOKENS, "labels": LABELS}, {}, (4, 32, 20)),
        (OTHER_FIRST, {"tokens": "b", "mask": "c"}, (4, 32, 20)),
        ((TOKENS, torch.rand(4), MASK), {"tokens": 0, "mask": 2}, (4, 32, 20)),
        ((torch.rand(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64)), {}, (5, None, None)),
        ("text", {}, (0, None, None)),
    ],
)
def test_what_a_batch_holds(batch: Any, keys: dict[str, Any], expected: tuple[int, int | None, int | None]) -> None:
    samples, tokens, real = batch_size(batch, tokens_key=keys.get("tokens"), mask_key=keys.get("mask"))
    assert (samples, tokens, None if real is None else int(real)) == expected


class _Sleeper(LightningModule):
    """Steps and validation batches of known length."""

    def __init__(self, step: float = 0.02, validation: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.step_seconds = step
        self.validation_seconds = validation

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.step_seconds)
        return self.weight * batch.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.validation_seconds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(callback: ThroughputCallback, module: LightningModule, length: int = 8, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 8, "strategy": "shard_ddp", "devices": 1, "limit_val_batches": 0,
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "logger": False,
    }  # fmt: skip
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **(settings | arguments))
    loader = DataLoader(torch.zeros(64, length, dtype=torch.int64), batch_size=4)
    trainer.fit(module, loader, DataLoader(TOKENS, batch_size=4))
    return trainer


def _with_validation() -> float:
    module = _Sleeper(step=0.005, validation=0.5)
    trainer = _fit(ThroughputCallback(4), module, limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0)
    return float(trainer.callback_metrics["step_seconds"])


def test_validation_is_not_a_part_of_a_step() -> None:
    (seconds,) = run_distributed(_with_validation, 1)
    # Half of a validation's 0.5 s would fall on each step.
    assert 0.005 < seconds < 0.2


class _Slow(torch.utils.data.Dataset[Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(8)


class _Meeting(_Sleeper):
    """Ranks meet in forward, where DDP sends buffers and FSDP gathers, and in backward."""

    def __init__(self, step: float) -> None:
        super().__init__(step)
        self.weight = None
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.step_seconds)
        return self.net(batch).pow(2).mean()


def _slow(where: str, slow: int | None, strategy: str) -> list[tuple[bool, Window, str]]:
    seconds = 0.3 if torch.distributed.get_rank() == slow else 0.0
    callback = ThroughputCallback(3)
    data = _Slow(seconds / 4 if where == "data" else 0.0)
    module = _Meeting(0.2 + (seconds if where == "step" else 0.0))
    before = torch.distributed.Work.wait
    settings: dict[str, Any] = {"max_steps": 6, "strategy": strategy, "devices": 2, "limit_val_batches": 0}
    quiet = ("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger")
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **settings, **dict.fromkeys(quiet, False))
    trainer.fit(module, DataLoader(data, batch_size=4))
    assert torch.distributed.Work.wait is before
    text = summary_table(callback.windows, blocked=0.0, on_cpu=True)
    return [(window.stands_out, window, f"{window_line(window, None)}\n{text}") for window in callback.windows]


@pytest.mark.parametrize(("where", "slow"), [("data", 0), ("step", 1)])
@pytest.mark.parametrize(
    "strategy",
    ["shard_ddp"]
    + [
        pytest.param(name, marks=pytest.mark.matrix)
        for name in ("ddp", "shard_fsdp", "shard_deepspeed_stage_1", "shard_deepspeed_stage_3")
    ],
)
def test_a_slow_rank_is_named_with_its_node_and_what_it_does(strategy: str, where: str, slow: int) -> None:
    for windows in run_distributed(_slow, 2, where, slow, strategy):
        # The first window warms up, on one rank longer than on the other.
        for stands_out, window, text in windows[1:]:
            assert (stands_out, window.slowest_rank) == (True, slow), text
            assert f"rank {slow} on {socket.gethostname()}, " in text
            assert f"slowest: rank {slow}" in text
            assert "slowest in 1 of 1 windows: " in text
            assert window.lag_seconds > 0.1
            assert (window.data_seconds > 0.15) == (where == "data")
            assert window.compute_seconds > (0.45 if where == "step" else 0.15)
            assert window.compute_seconds + window.data_seconds <= window.step_seconds


def _rank(own: float, data: float) -> RankWindow:
    return RankWindow(seconds=10.0, samples=1.0, data_seconds=data, peer_seconds=10.0 - own)


@pytest.mark.parametrize(
    ("own", "stands_out"), [([5.0, 5.0, 5.0, 7.5], True), ([5.0, 5.0, 5.0, 6.5], False), ([2.0, 7.0, 7.5, 8.0], False)]
)
def test_a_rank_stands_out_by_a_fifth_of_the_step_above_the_median_of_the_others(
    own: list[float], stands_out: bool
) -> None:
    window = combine([_rank(seconds, 1.0) for seconds in own], step=5, steps=5, peak=None)
    assert window is not None
    assert (window.slowest_rank, window.data_seconds, window.stands_out) == (3, 0.2, stands_out)
    assert window.compute_seconds == pytest.approx((own[3] - 1.0) / 5)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps is 0"):
        ThroughputCallback(0)
