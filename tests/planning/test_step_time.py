"""The time of a step: rooflines of operators, and what the schedules of engines hide, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_shard.engines.memory_model import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.operators import Device, OperatorTimes, Work, product_seconds
from lightning_shard.planning.step_time import (
    BETWEEN,
    CPU_STEP,
    HOST,
    INSIDE,
    MEMORY,
    PRODUCTS,
    Rates,
    step_time,
)
from lightning_shard.planning.traffic import Nodes
from tests.planning.support import BF16, model

DEVICE = Device(products=1e12, single=1e11, memory=1e9, processors=10, launch=1e-3, kernel=1e-9, host=1e6, shared=0)
UNITS = ("unit 1", "unit 2", "unit 3")
NAMES = ("", *UNITS)


def trace(seconds: float = 1.0) -> Trace:
    """A root without operators and three units that compute so long in forward, and twice as long in backward."""
    forward = [Segment(phase="forward", unit=unit) for unit in UNITS]
    done = [tuple(reversed(UNITS[i:])) for i in range(3)]
    backward = [Segment(phase="backward", unit=unit, complete=done[i]) for i, unit in reversed([*enumerate(UNITS)])]
    end = Segment(phase="backward", unit="", complete=(*done[0], ""))
    work = [Work(products=seconds)] * 3 + [Work(products=2 * seconds)] * 3 + [Work()]
    return Trace(segments=(*forward, *backward, end), batch_size=1, work=tuple(work))


def rates(speed: float | None, *, nodes: int = 1, memory: float = 1e30) -> Rates:
    device = replace(DEVICE, memory=memory)
    return Rates(device=device, nodes=Nodes(nodes=nodes, devices=2), inside=speed, between=speed)


def training(micro_batches: int = 1) -> Training:
    return Training(model=model(0, 1000, 1000, 1000, units=3), policy=BF16, micro_batches=micro_batches)


FULL = FSDPFacts(replicate=1, shard=2)
# A unit's 10,000 elements: gathered in bf16 and reduced in fp32, half of it sent.
GATHER, REDUCE = 10_000 * 2 / 2, 10_000 * 4 / 2


def parts(
    engine: EngineFacts, speed: float | None, seconds: float = 1.0, count: int = 1, **given: float
) -> dict[str, float]:
    found = step_time(training(count), engine, trace(seconds), rates(speed, **given)).parts  # type: ignore[arg-type]
    return {name: spent for name, spent in found.items() if spent > 1e-3}


def test_communication_hides_behind_compute_unit_by_unit() -> None:
    # A gather takes a tenth of a second and a reduction two: seen are the first gather of forward and of backward, and
    # the last reduction.
    assert parts(FULL, GATHER / 0.1) == pytest.approx({PRODUCTS: 9.0, INSIDE: 0.1 + 0.1 + 0.2}, rel=1e-3)
    # Alone a maximum of totals would hide all of it: 0.3 + 0.3 + 0.6 s beside 9 s.
    assert parts(FULL, None) == {PRODUCTS: 9.0}


def test_what_does_not_hide_is_waited_for() -> None:
    # Gathers of 4 s: 3 in forward, each while the one before computes for 1 s; in backward the last unit is gathered
    # again, and each gather waits for the reduction (8 s) that was begun before it.
    slow = step_time(training(), FULL, trace(), rates(GATHER / 4))
    assert slow.bound == INSIDE
    assert slow.inside == pytest.approx(3 * 4 + 3 * 4 + 3 * 8, rel=1e-3)
    assert slow.expected > slow.inside
    kept = step_time(training(), replace(FULL, reshard_after_forward=False), trace(), rates(GATHER / 4))
    assert kept.expected == pytest.approx(slow.expected - 3 * 4, abs=4.01)
    across = step_time(training(), FSDPFacts(replicate=1, shard=4), trace(), rates(GATHER / 4, nodes=2))
    assert across.bound in (BETWEEN, INSIDE)


def test_reductions_that_do_not_overlap() -> None:
    reduce = REDUCE * 2  # an all-reduce sends twice as much
    behind = parts(TorchDDPFacts(ranks=2), reduce / 0.5)
    assert behind == pytest.approx({PRODUCTS: 9.0, INSIDE: 0.5}, rel=1e-3)
    # Stage 2 reduces in bf16's bucket of `reduce`, without overlap by default.
    beside = parts(DeepSpeedFacts(ranks=2, stage=2), reduce / 0.5)
    assert beside[INSIDE] == pytest.approx(3 * 0.5 + 3 * 0.5 / 4, rel=0.01)  # and gathers the new parameters


def test_accumulation_reduces_where_the_engine_does() -> None:
    every, once = FULL, replace(FULL, reduce_at_boundary=True)
    assert parts(every, GATHER / 0.1, count=3)[INSIDE] == pytest.approx(3 * 0.4, rel=0.01)
    assert parts(once, GATHER / 0.1, count=3)[INSIDE] == pytest.approx(3 * 0.2 + 0.2, rel=0.01)


def test_offload_is_not_free() -> None:
    away = parts(replace(FULL, cpu_offload=True), None)
    # 15,000 elements of a rank by torch on a node of two ranks; shards of fp32 over a link of 1 MB/s, hidden but for
    # the first ones and the last.
    assert away[HOST] == pytest.approx(3 * 5000 * 4 / 1e6, rel=0.01)
    slow = step_time(training(), replace(FULL, cpu_offload=True), trace(), rates(None)).parts
    assert slow[CPU_STEP] == pytest.approx(15_000 * 2 / 0.7e9, rel=0.01)
    nvme = DeepSpeedFacts(ranks=2, stage=3, optimizer_device="nvme", param_device="nvme")
    assert "NVMe" not in step_time(training(), nvme, trace(), rates(None)).parts  # too small to be swapped
    large = Training(model=model(0, 100_000, 100_000, 100_000, units=3), policy=BF16)
    swapped = step_time(large, nvme, trace(), rates(None)).parts
    assert swapped["NVMe"] == pytest.approx(2 * 2 * 1_500_000 * 12 / 12e9, rel=0.01)


def test_the_optimizer_moves_its_bytes() -> None:
    spent = step_time(training(), FULL, trace(), rates(None, memory=1e6)).parts[MEMORY]
    # Of 15,000 fp32 elements; buffers are read and written: 2 gathers in bf16 and a reduction in fp32 of each unit.
    assert spent == pytest.approx((22 * 15_000 * 4 + 2 * 30_000 * (2 + 2 + 4)) / 1e6, rel=0.01)


def test_operators_as_they_run_and_compiled() -> None:
    device = replace(DEVICE, memory=1e9, kernel=1e-9)
    times, x = OperatorTimes(device, lambda: 0), torch.zeros(1000, 1000)
    layer = nn.Linear(1000, 1000, bias=False)
    with torch.no_grad(), times:
        y = torch.relu(layer(x) * 2 + 1)
        y.view(-1).t()
        torch.mm(y, x)
    work = times.parts[0]
    size = 4e6 / 1e9
    assert (work.operators, work.kernels) == (5, 3)
    # Three operators read and write a matrix each; fused they read the product once and write what the next one reads.
    assert work.memory == pytest.approx(6 * size)
    assert work.fused == pytest.approx(2 * size)
    assert work.products == pytest.approx(2 * product_seconds(device, 1, 1000, 1000, 1000, torch.float32))
