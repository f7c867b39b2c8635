"""How the time to plan a save grows with the number of ranks, which are made up: no processes, no values.

A GPT's masters and AdamW state, sharded by rows (FSDP2) or as flat partitions (ZeRO), or full on every rank (DDP). What
is timed is what rank 0 does while the others wait: reading what they hold, dividing it, writing the replies. Beside it,
torch's own planner on the same tensors, as far as it comes in a minute.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from examples.benchmarks import report
from lightning_shard.checkpoint.plan import LocalTensor, divide
from lightning_shard.tensors.flat import boxes

LAYOUTS = {"rows": "sharded by rows (FSDP2)", "flat": "flat partitions (ZeRO)", "whole": "replicas (DDP)"}
COLUMNS = {"layout": "", "ranks": "ranks", "boxes": "boxes", "seconds": "CPU seconds", "torch_seconds": "torch's"}
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Point:
    """Seconds of one plan."""

    layout: str
    ranks: int
    boxes: int
    """That all ranks hold together."""

    seconds: float
    torch_seconds: float | None
    """None where it would take longer than `PATIENCE_SECONDS`."""


def gpt_tensors(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """Key to shape of a GPT's parameters, each with two slots of its shape and a step count."""
    parameters: dict[str, tuple[int, ...]] = {"embed": (50304, width), "positions": (1024, width), "norm": (width,)}
    for layer in range(layers):
        for name, shape in {
            "attention.qkv": (3 * width, width),
            "attention.out": (width, width),
            "mlp.up": (4 * width, width),
            "mlp.down": (width, 4 * width),
            "norm_1": (width,),
            "norm_2": (width,),
        }.items():
            parameters[f"blocks.{layer}.{name}"] = shape
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        found[f"model.{name}"] = shape
        found |= {f"optimizer.0.{name}.{slot}": shape for slot in ("exp_avg", "exp_avg_sq")}
        found[f"optimizer.0.{name}.step"] = ()
    return found


def held_by(rank: int, size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> tuple[LocalTensor, ...]:
    """What one rank holds."""
    return tuple(
        LocalTensor(key, shape, torch.float32, tuple(cut(rank, size, layout, shape))) for key, shape in tensors.items()
    )


def cut(rank: int, size: int, layout: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of a rank's boxes of one tensor."""
    if layout == "whole" or not shape:
        yield (0,) * len(shape), shape
    elif layout == "rows":
        rows = -(-shape[0] // size)
        first = min(rank * rows, shape[0])
        if first < shape[0]:
            yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:])
    else:
        elements = torch.Size(shape).numel()
        part = -(-elements // size)
        start = min(rank * part, elements)
        for box in boxes(shape, start, min(part, elements - start)):
            yield box.offsets, box.sizes


def time_of_plan(size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> tuple[float, int]:
    """Seconds, and the number of boxes."""
    sent = [pickle.dumps(held_by(rank, size, layout, tensors)) for rank in range(size)]

    def plan() -> int:
        held = [pickle.loads(part) for part in sent]
        for numbers in divide(held)[0]:
            pickle.dumps(numbers)
        return sum(len(part.boxes) for rank in held for part in rank)

    return timed(plan)


def time_of_torch(size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> float:
    """The same with torch's planner and its own items."""

    def items(rank: int) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(part.key, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                    properties=TensorProperties(dtype=part.dtype),
                    size=torch.Size(part.shape),
                ),
            )
            for part in held_by(rank, size, layout, tensors)
            for offsets, sizes in part.boxes
        ]

    sent = [pickle.dumps(SavePlan(items(rank))) for rank in range(size)]

    def plan() -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        for part in planner.create_global_plan([pickle.loads(part) for part in sent])[0]:
            pickle.dumps(part)

    return timed(plan)[0]


def timed(work: Callable[[], int | None]) -> tuple[float, int]:
    """Seconds that the processor had ``work``, whatever else the machine was doing, and what it returned."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result or 0


def measure(ranks: list[int], layers: int, width: int) -> list[Point]:
    """Every layout with every number of ranks, in rising order."""
    tensors = gpt_tensors(layers, width)
    points: list[Point] = []
    for layout in LAYOUTS:
        expected = 0.0  # of torch's planner: at worst it takes four times as long for twice the ranks
        for size in ranks:
            seconds, count = time_of_plan(size, layout, tensors)
            torch_seconds = time_of_torch(size, layout, tensors) if expected < PATIENCE_SECONDS else None
            expected = 4 * (expected if torch_seconds is None else torch_seconds)
            points.append(Point(layout, size, count, seconds, torch_seconds))
    return points


def rows_of(points: list[Point]) -> list[report.Row]:
    """A row for each point."""
    return [{**asdict(point), "layout": LAYOUTS[point.layout]} for point in points]


def draw(points: list[Point], path: Path) -> None:
    """Both planners over the number of ranks, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LAYOUTS), figsize=(8.3, 3.2), sharey=True)
    for axis, (layout, title) in zip(axes, LAYOUTS.items(), strict=True):
        mine = [p for p in points if p.layout == layout]
        axis.loglog([p.ranks for p in mine], [p.seconds for p in mine], "o-", label="lightning_shard")
        other = [p for p in mine if p.torch_seconds is not None]
        axis.loglog([p.ranks for p in other], [p.torch_seconds for p in other], "s--", label="torch's own planner")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds to plan a save on rank 0\n(lower is better)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
