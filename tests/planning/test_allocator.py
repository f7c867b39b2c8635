"""The model of torch's caching allocator: reserved bytes, by hand from the rules of its source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_shard.engines.memory_model import DeepSpeedFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.engines.units import find_units
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.device_memory import BLOCKS, CONTEXT, CUBLAS, NCCL, Allocator, DeviceMemory, MiB, replay
from lightning_shard.planning.device_memory import device_memory as all_of
from lightning_shard.planning.memory_trace import Segment, Step, Trace, trace_step
from lightning_shard.planning.model_facts import Training, model_facts
from lightning_shard.planning.predict import step_points
from lightning_shard.planning.step_memory import Point
from lightning_shard.tensors import fake
from tests.planning.support import BF16, model


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MiB, 512),  # Sizes are multiples of 512 bytes, and small ones share segments of 2 MiB.
        (513, 2 * MiB, 1024),
        (MiB, 2 * MiB, MiB),
        (MiB + 1, 20 * MiB, MiB + 512),  # Up to 10 MiB they share segments of 20 MiB.
        (10 * MiB - 512, 20 * MiB, 10 * MiB - 512),
        (10 * MiB, 10 * MiB, 10 * MiB),  # From there on each has its own, of whole 2 MiB: what is left is no block.
        (11 * MiB, 12 * MiB, 12 * MiB),
        (129 * MiB - 5, 130 * MiB, 130 * MiB),
    ],
)
def test_one_allocation(size: int, reserved: int, allocated: int) -> None:
    device = Allocator()
    device.free(block := device.allocate(size))
    assert (device.reserved, device.most_allocated, device.allocated) == (reserved, allocated, 0)
    assert block.size == reserved  # Whole again.


def test_blocks_are_split_and_joined() -> None:
    device = Allocator()
    first, second = device.allocate(3 * MiB), device.allocate(18 * MiB)
    assert device.reserved == (20 + 18) * MiB  # 17 MiB are left of the first segment: not enough.
    third = device.allocate(4 * MiB)
    assert device.reserved == 38 * MiB
    device.free(first)
    device.free(third)
    # 20 MiB in one piece again.
    whole = device.allocate(19 * MiB)
    assert (whole.size, device.reserved) == (20 * MiB, 38 * MiB)
    device.free(second)
    device.free(whole)
    # Of what is free the smallest block that is large enough, which is not split where 1 MiB is left.
    assert device.allocate(17 * MiB).size == 18 * MiB
    assert device.allocate(17 * MiB).size == 17 * MiB
    assert device.reserved == 38 * MiB


def test_fragments_and_streams() -> None:
    device = Allocator()
    blocks = [device.allocate(9 * MiB) for _ in range(4)]  # Two in a segment; 2 MiB of each are left.
    assert device.reserved == 40 * MiB
    device.free(blocks[0])
    device.free(blocks[2])
    # 22 MiB are free, and in no piece of more than 9.
    device.allocate(12 * MiB)
    assert device.reserved == 52 * MiB
    # What one stream has freed no other gets, nor do small tensors get large blocks.
    device.allocate(9 * MiB, "other")
    device.allocate(100)
    assert device.reserved == (52 + 20 + 2) * MiB


def test_expandable_segments_have_no_fragments_at_their_end() -> None:
    device = Allocator(expandable=True)
    first, second = device.allocate(9 * MiB), device.allocate(9 * MiB)
    assert device.reserved == 20 * MiB
    device.free(second)
    device.allocate(40 * MiB)  # 11 MiB at the end are free: 29 more, in whole 20 MiB.
    assert device.reserved == 60 * MiB
    device.free(first)
    device.allocate(512 + MiB)  # The first hole, and not the end.
    device.allocate(8 * MiB - 512)
    assert (device.reserved, device.allocated) == (60 * MiB, 49 * MiB)


def test_a_step_by_hand() -> None:
    """Two steps: states, a unit's activations, the gradient that stays on a stream of its own."""
    training = Training(model=model(10), policy=BF16)  # One parameter.
    # Forward makes 30 MiB, of which 12 are gone before backward makes 24: they fit into no block that is free.
    events = ((0, 1, 12 * MiB), (0, 2, 18 * MiB), (0, 1, 0), (1, 3, 24 * MiB), (1, 2, 0), (1, 3, 0))
    segments = (Segment(phase="forward", unit=""), Segment(phase="backward", unit=""))
    trace = Trace(segments=segments, batch_size=1, events=events)
    states = KindBytes(parameters=40 * MiB, optimizer=80 * MiB)

    def point(name: str, gradients: int = 0, communication: int = 0) -> Point:
        kinds = KindBytes(
            parameters=40 * MiB, optimizer=80 * MiB, gradients=gradients * MiB, communication=communication * MiB
        )
        apart = KindBytes(gradients=gradients * MiB)
        return Point(name=name, account=MemoryAccount(device=kinds), own_stream=apart)

    points = [point("forward outside of units"), point("backward outside of units", 14, 6), point("optimizer step", 14)]
    # 40 of parameters, twice 40 of slots, 12 + 18 + 24 of the trace, and 14 of gradients; communication takes half of
    # the free 12.
    assert replay(points, trace, training, expandable=False) == (40 + 80 + 12 + 18 + 24 + 14) * MiB
    # In whole 20 MiB: 40 + 12 + 18 + 24 at first, of which slots take what is free, then again 12 + 18
    # and 24 at the end; 14 on the other stream.
    assert replay(points, trace, training, expandable=True) == (180 + 20) * MiB
    found = all_of(points, training, FSDPFacts(replicate=2, shard=2), trace)
    assert found.tensors == states.total + 20 * MiB
    assert list(found.overhead) == [BLOCKS, "NCCL, 2 communicators", "cuBLAS workspaces", "CUDA context"]
    assert found.bounds[0] == 188 * MiB + 2 * NCCL[0] + CUBLAS[0] + CONTEXT[0]
    assert found.bounds[1] == 200 * MiB + 2 * NCCL[1] + CUBLAS[1] + CONTEXT[1]


def test_communicators() -> None:
    engines = (TorchDDPFacts(ranks=1), TorchDDPFacts(ranks=2), FSDPFacts(replicate=2, shard=1))
    assert [e.communicators for e in engines] == [0, 1, 1]
    assert DeepSpeedFacts(ranks=8, stage=3, zero_hpz_partition_size=4).communicators == 2


def test_larger_batches() -> None:
    small = DeviceMemory(tensors=100, overhead={BLOCKS: (5, 20), "x": (1, 2)})
    assert [small.at(tensors)[1] for tensors in (100, 200, 50)] == [122, 122 + 100 + 20, 122 - 50 - 10]
    assert [small.at(tensors)[0] for tensors in (100, 200, 50)] == [106, 106 + 100 + 5, 106 - 50 - 2]
    small = replace(small, growth=0.1)
    assert (small.at(200)[1], small.at(50)[1]) == (122 + 100 + 10, 122 - 50 - 10)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.mark.parametrize("expandable", [False, True])
def test_a_trace_is_replayed(*, expandable: bool) -> None:
    module, mode = _Two(), fake.fake_mode()
    fake.make_fake(module, mode)
    step = Step(training_step=module, batch=torch.zeros(8192, 1024), units=find_units(module, "auto"))
    trace = trace_step(module, step, BF16, mode)
    # All that is made is freed, but for the batch, its cast and the loss.
    alive = {}
    for _, key, size in trace.events:
        alive[key] = size
    assert sum(alive.values()) == trace.segments[-1].end_activations
    training = Training(model=model_facts(module, units=step.units), policy=BF16)
    engine = FSDPFacts(replicate=1, shard=4)
    points = step_points(training, engine, trace)
    reserved = replay(points, trace, training, expandable=expandable)
    most = max(p.account.device.total for p in points)
    # Gradients and all-gathers have streams of their own, whose peaks come at other times.
    assert most < reserved < 1.5 * most
