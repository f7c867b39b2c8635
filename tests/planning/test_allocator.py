"""The model of torch's caching allocator: reserved bytes, by hand from the rules of its source."""

from __future__ import annotations

import pytest

from lightning_shard.engines.memory_model import FSDPFacts
from lightning_shard.memory import KindBytes, MemoryAccount
from lightning_shard.planning.device_memory import BLOCKS, CONTEXT, CUBLAS, NCCL, Allocator, MiB, replay
from lightning_shard.planning.device_memory import device_memory as all_of
from lightning_shard.planning.memory_trace import Segment, Trace
from lightning_shard.planning.model_facts import Training
from lightning_shard.planning.step_memory import Point
from tests.planning.support import BF16, model


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MiB, 512),  # Sizes are multiples of 512 bytes, and small ones share segments of 2 MiB.
        (MiB + 1, 20 * MiB, MiB + 512),  # Up to 10 MiB they share segments of 20 MiB.
        (10 * MiB, 10 * MiB, 10 * MiB),  # From there on each has its own, of whole 2 MiB: what is left is no block.
        (11 * MiB, 12 * MiB, 12 * MiB),
    ],
)
def test_one_allocation(size: int, reserved: int, allocated: int) -> None:
    device = Allocator()
    device.free(block := device.allocate(size))
    assert (device.reserved, device.most_allocated, device.allocated) == (reserved, allocated, 0)
    assert block.size == reserved  # Whole again.


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
