"""The meters in a run: memory tables and errors, traces, and what they say where something is not known."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError
from lightning_shard.callbacks.memory_report import MemoryCallback
from lightning_shard.callbacks.profiler import ProfilerCallback
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.meters.flops import FlopCount
from lightning_shard.meters.memory_account import (
    append_to_message,
    is_out_of_memory,
)
from lightning_shard.meters.throughput_windows import RankWindow, combine
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer


def test_a_window_of_two_ranks() -> None:
    ranks = [
        RankWindow(seconds=2.0, samples=8, tokens=80, real_tokens=60, flops=6e12, data_seconds=1.0, allocated=5),
        RankWindow(seconds=4.0, samples=4, tokens=40, real_tokens=40, flops=2e12, checkpoint_seconds=3, allocated=9),
    ]
    window = combine(ranks, step=10, steps=2, peak=2e12, grad_norm=0.5)
    assert window is not None
    # All work over the slowest rank's time.
    assert (window.step_seconds, window.samples_per_second, window.tokens_per_second) == (2.0, 3.0, 25.0)
    assert window.tokens_per_second_per_device == 12.5
    assert window.padding_share == pytest.approx(20 / 120)
    # 8e12 FLOPs in 4 s on two devices of 2e12 FLOP/s.
    assert window.mfu == 0.5
    assert (window.data_share, window.checkpoint_seconds) == (1 / 8, 3)
    assert (window.allocated, window.largest_rank) == (9, 1)
    without = combine(ranks, step=10, steps=2, peak=None)
    assert without is not None
    assert without.mfu is None
    assert combine([RankWindow()], step=1, steps=1, peak=None) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_that_memory_is_used_up(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    wrapped = ValueError("in a loop")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected
    append_to_message(error, "the table")
    assert str(error).endswith("\nthe table")


class _Greedy(TinyLM):
    """Asks the real allocator for 4 PiB in its third step, or in its first one before anything was measured."""

    def __init__(self, step: int) -> None:
        super().__init__(width=64)
        self.greedy_step = step

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.greedy_step:
            torch.empty(1 << 50)
        return loss


def _out_of_memory(strategy: str, step: int) -> str:
    """The message of an error that every rank has."""
    trainer = quiet_trainer(strategy=strategy, max_steps=5, callbacks=[MemoryCallback()])
    try:
        trainer.fit(_Greedy(step), loader())
    except RuntimeError as error:
        return str(error)
    raise AssertionError("4 PiB were there")


@pytest.mark.parametrize(("strategy", "step"), [("shard_ddp", 2), ("shard_fsdp", 0), ("shard_deepspeed_stage_2", 2)])
def test_an_error_says_where_the_memory_went_and_what_holds_less(strategy: str, step: int) -> None:
    message = run_distributed(_out_of_memory, 2, strategy, step)[1]
    lines = message.splitlines()
    assert "can't allocate memory" in lines[0]
    table = lines.index("Memory of rank 1, as far as it was counted")
    kinds = {line.split()[0] for line in lines[table + 2 :] if line}
    assert {"parameters", "gradients", "optimizer", "activations", "total"} <= kinds
    advice = lines.index("These settings hold less on each rank's device, by this account:")
    offload = {"shard_ddp": "shard_fsdp_offload", "shard_fsdp": "shard_fsdp_offload"}
    expected = offload.get(strategy, "shard_deepspeed_stage_2_offload")
    assert any(line.startswith(f"  strategy: {expected}: ") for line in lines[advice + 1 :])


def _metered(strategy: str) -> dict[str, Any]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    throughput = ThroughputCallback(every_n_steps=2, peak_tflops=1e-3)
    memory = MemoryCallback()
    # Writing traces takes seconds.
    profiler = ProfilerCallback(steps=[1, 3, 4] if strategy == "shard_fsdp" else [99], snapshots=True)
    trainer = quiet_trainer(
        strategy=strategy, precision="bf16-mixed", max_steps=7, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=CSVLogger("."), callbacks=[throughput, memory, profiler],
    )  # fmt: skip
    trainer.fit(TinyLM(width=64), loader())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(handler)
    traces = {}
    for path in profiler.files:
        with gzip.open(path) as file:
            traces[path.name] = len(json.load(file)["traceEvents"])
    table = Path(trainer.log_dir or "") / "throughput.csv"
    rows = list(csv.DictReader(table.open())) if trainer.is_global_zero else []
    return {
        "lines": lines, "traces": traces, "communication": profiler.communication, "rows": rows,
        "flops": throughput.flops.count, "metrics": {n: float(v) for n, v in trainer.callback_metrics.items()},
        "predicted": memory.predicted, "measured": memory.measured, "ranks": memory.ranks,
    }  # fmt: skip


def _step_flops() -> int:
    """Forward FLOPs of TinyLM(width=64) for 4 sequences of 8: two for each weight of a matrix and token."""
    weights = 3 * 2 * 64 * (3 * 64 + 1) + 64 * 37
    return 2 * 4 * 8 * weights


@pytest.mark.parametrize("strategy", sampled(["shard_fsdp", "shard_deepspeed_stage_3_aligned"], 0))
def test_all_meters_in_one_run(strategy: str) -> None:
    results = run_distributed(_metered, 2, strategy, timeout=200)
    for rank, found in enumerate(results):
        assert found["flops"] == FlopCount(forward=_step_flops(), backward=2 * _step_flops())
        if strategy == "shard_fsdp":
            # Step 1 without a warm-up, 3 and 4 after the second; on a CPU no snapshots, and a line that says so.
            assert sorted(found["traces"]) == [f"rank{rank}-steps1-1.json.gz", f"rank{rank}-steps3-4.json.gz"]
            assert all(events > 100 for events in found["traces"].values())
            assert 0 < found["communication"].share < 1
        assert found["metrics"]["tokens/s"] == pytest.approx(64 * 2 / found["metrics"]["step_seconds"], abs=0.51)
        assert found["metrics"]["mfu"] > 0
        assert found["measured"] == found["ranks"][rank]
        # Arithmetic and live tensors agree but for paddings, and for what is there only for a moment.
        for kind in ("parameters", "masters", "optimizer"):
            predicted, measured = (getattr(found[name].device, kind) for name in ("predicted", "measured"))
            assert measured == pytest.approx(predicted, rel=0.02)
    first, second = results
    assert first["ranks"] == second["ranks"]
    text = "\n".join(first["lines"])
    for line in (
        "device, predicted", "measured in the first step", "activations: measured, not predicted",
        "ProfilerCallback: snapshots is true",
        "Throughput: 5 optimizer steps in 3 windows, 2 devices", "waiting for data", "gradient norm", "MFU",
    ):  # fmt: skip
        assert line in text
    # Not a terminal: a line for each window.
    assert re.search(
        r"^step 4: loss \d\.\d+, grad_norm \S+, [\d,]+ tokens/s, MFU \S+ ?%, \S+ [GM]iB on rank \d(; slowest: .*)?$",
        text,
        re.M,
    )
    assert [int(row["step"]) for row in first["rows"]] == [2, 4, 6, 7]
    assert all(float(row["mfu"]) > 0 and float(row["grad_norm"]) > 0 for row in first["rows"])


class _Awkward(LightningModule):
    """No tokens, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch[batch[:, 0] > -1]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class _Endless(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(3)


def _stock() -> tuple[Any, FlopCount | None, dict[str, float]]:
    throughput, memory = ThroughputCallback(every_n_steps=2, peak_tflops=1.0), MemoryCallback()
    trainer = quiet_trainer(strategy="ddp", max_steps=4, callbacks=[throughput, memory])
    trainer.fit(TinyLM(width=64), loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return memory.measured, throughput.flops.count, metrics


def test_they_measure_under_lightnings_own_strategies_too() -> None:
    for measured, flops, metrics in run_distributed(_stock, 2):
        trained = 3 * (2 * 64 + 64 * 193 + 193 + 193 * 64 + 64) + 2 * 37 * 64 + 64
        assert measured.device.gradients == measured.device.communication == 4 * trained
        assert measured.device.parameters == 4 * (trained + 64)
        assert flops == FlopCount(forward=_step_flops(), backward=2 * _step_flops())
        assert metrics["mfu"] > 0


def _awkward(peak: float | None) -> tuple[dict[str, float], str | None, int]:
    throughput, memory = ThroughputCallback(every_n_steps=2, peak_tflops=peak), MemoryCallback()
    trainer = quiet_trainer(strategy="shard_ddp", max_steps=4, callbacks=[throughput, memory])
    trainer.fit(_Awkward(), DataLoader(_Endless(), batch_size=4))
    assert memory.measured is not None
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, throughput.flops.why_not, memory.measured.device.parameters


def test_what_is_not_known_is_left_out_and_the_rest_goes_on() -> None:
    for peak, reason in ((None, "the peak of 'cpu' in float32 is not known"), (1.0, "does not run without values")):
        for metrics, why_not, parameters in run_distributed(_awkward, 2, peak):
            assert why_not is not None
            assert reason in why_not
            assert not {"mfu", "tokens/s"} & set(metrics)
            assert metrics["samples/s"] == pytest.approx(8 / metrics["step_seconds"])
            assert parameters == 16


def test_settings_that_can_not_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="steps is \\[0\\]"):
        ProfilerCallback(steps=[0])
    with pytest.raises(ConfigurationError, match="peak_tflops is -1"):
        ThroughputCallback(peak_tflops=-1)
