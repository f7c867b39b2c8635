"""How the time to plan a save grows with the number of ranks, which are made up: no processes, no values.

A GPT's masters and AdamW state, sharded by rows (FSDP2) or as flat partitions (ZeRO), or full on every rank (DDP). The
time is rank 0's work while the others wait: reading their lists of tensors, dividing them, writing the replies. torch's
own planner runs on the same tensors for comparison, as far as it comes in a minute.

    python -m examples.benchmarks.planning --ranks 1024 16384

does it for a Llama of 70B by rows, with the index of boxes that follows the writing, and each rank's use of it when the
checkpoint is loaded.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from examples.benchmarks import report
from lightning_shard.checkpoint.files.boxes import DecodedBoxes, PlannedBoxes, TensorFacts
from lightning_shard.checkpoint.files.layout import BOXES, FileEntry
from lightning_shard.checkpoint.files.manifest import Facts, Manifest, TensorEntry
from lightning_shard.checkpoint.files.tensor_files import WrittenFiles, data_file, describe_boxes
from lightning_shard.checkpoint.save_plan import LocalBoxes, divide_boxes, local_boxes, who_describes
from lightning_shard.tensors.flat import boxes

LAYOUTS = {"rows": "sharded by rows (FSDP2)", "flat": "flat partitions (ZeRO)", "whole": "replicas (DDP)"}
COLUMNS = {"layout": "", "ranks": "ranks", "boxes": "boxes", "seconds": "CPU seconds", "torch_seconds": "torch's"}
LARGE_COLUMNS = {
    "ranks": "ranks",
    "boxes": "boxes",
    "planned": "rank 0 plans, CPU s",
    "described": "rank 0 describes, CPU s",
    "megabytes": "boxes.bin, MB",
    "read": "each rank reads it, CPU s",
}
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
    """None if it would take longer than `PATIENCE_SECONDS`."""


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
    return with_slots(parameters)


def with_slots(parameters: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Key to shape of the parameters and of AdamW's state of them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        found[f"model.{name}"] = shape
        found |= {f"optimizer.0.{name}.{slot}": shape for slot in ("exp_avg", "exp_avg_sq")}
        found[f"optimizer.0.{name}.step"] = ()
    return found


def facts_of(tensors: dict[str, tuple[int, ...]]) -> list[TensorFacts]:
    """The facts of the tensors that all ranks know."""
    return [TensorFacts(key, shape, torch.float32) for key, shape in tensors.items()]


def llama_70b() -> dict[str, tuple[int, ...]]:
    """The same of Llama 3 70B (arXiv 2407.21783, table 3)."""
    width, hidden, keys = 8192, 28672, 1024
    shapes = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    shapes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden), "n1": (width,), "n2": (width,)}
    parameters = {f"layers.{layer}.{name}": shape for layer in range(80) for name, shape in shapes.items()}
    return with_slots({**parameters, "embed": (128256, width), "output": (128256, width), "norm": (width,)})


def rows_held_by(rank: int, size: int, tensors: dict[str, tuple[int, ...]], names: LocalBoxes) -> LocalBoxes:
    """`held_by` of tensors of at most two dims by rows, without an object for each box. ``names``: of any rank."""
    shapes = np.array([(*shape, 1, 1)[:2] for shape in tensors.values()])
    sharded = np.array([len(shape) > 0 for shape in tensors.values()])
    rows = np.where(sharded, -(-shapes[:, 0] // size), 1)
    first = np.where(sharded, np.minimum(rank * rows, shapes[:, 0]), 0)
    count = np.minimum(rows, shapes[:, 0] - first)
    boxes = np.stack([np.stack([first, 0 * first], axis=1), np.stack([count, shapes[:, 1]], axis=1)], axis=1)
    return LocalBoxes(names.names, (count > 0).astype(np.int64), boxes[count > 0])


def held_by(rank: int, size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> LocalBoxes:
    """The boxes that one rank holds."""
    return local_boxes(facts_of(tensors), [list(cut(rank, size, layout, shape)) for shape in tensors.values()])


def cut(rank: int, size: int, layout: str, shape: tuple[int, ...]) -> Iterator[ChunkStorageMetadata]:
    """A rank's boxes of one tensor."""
    if layout == "whole" or not shape:
        yield ChunkStorageMetadata(torch.Size((0,) * len(shape)), torch.Size(shape))
    elif layout == "rows":
        rows = -(-shape[0] // size)
        first = min(rank * rows, shape[0])
        if first < shape[0]:
            sizes = (min(rows, shape[0] - first), *shape[1:])
            yield ChunkStorageMetadata(torch.Size((first, *(0 for _ in shape[1:]))), torch.Size(sizes))
    else:
        elements = torch.Size(shape).numel()
        part = -(-elements // size)
        start = min(rank * part, elements)
        for box in boxes(shape, start, min(part, elements - start)):
            yield ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def time_of_plan(size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> tuple[float, int]:
    """Seconds, and the number of boxes."""
    sent = [pickle.dumps(held_by(rank, size, layout, tensors)) for rank in range(size)]

    def plan() -> int:
        held = [pickle.loads(part) for part in sent]
        who_describes(held)
        for numbers in divide_boxes(facts_of(tensors), held)[0]:
            pickle.dumps(numbers)
        return sum(len(part.boxes) for part in held)

    return timed(plan)


def time_of_torch(size: int, layout: str, tensors: dict[str, tuple[int, ...]]) -> float:
    """The same with torch's planner and its own items."""

    def items(rank: int) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=torch.float32), size=torch.Size(shape)
                ),
            )
            for key, shape in tensors.items()
            for chunk in cut(rank, size, layout, shape)
        ]

    sent = [pickle.dumps(SavePlan(items(rank))) for rank in range(size)]

    def plan() -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        for part in planner.create_global_plan([pickle.loads(part) for part in sent])[0]:
            pickle.dumps(part)

    return timed(plan)[0]


def timed(work: Callable[[], int | None]) -> tuple[float, int]:
    """CPU seconds of ``work``, whatever else the machine was doing, and its result."""
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


def measure_large(size: int) -> report.Row:
    """A save and a load of the 70B model by ``size`` ranks without the values: CPU seconds of rank 0 and another."""
    tensors = llama_70b()
    facts, names = facts_of(tensors), held_by(0, size, "rows", tensors)
    sent = [pickle.dumps(rows_held_by(rank, size, tensors, names)) for rank in range(size)]
    made: list[tuple[list[np.ndarray], PlannedBoxes]] = []

    def plan() -> None:
        held = [pickle.loads(part) for part in sent]
        who_describes(held)
        made.append(divide_boxes(facts, held))
        for part in made[0][0]:
            pickle.dumps(part)

    planned, _ = timed(plan)
    ((numbers, boxes),) = made
    files = {data_file(rank): FileEntry(size=10**13, sha256="") for rank in range(size)}
    first_of_rank = np.cumsum([0, *map(len, numbers)])
    lengths = np.zeros(first_of_rank[-1], dtype=np.int64)
    for table, rows in boxes.tables:
        sizes = rows[:, 3 + len(table.shape) :]
        lengths[first_of_rank[rows[:, 0]] + rows[:, 1]] = np.prod(sizes, axis=1) * 4 + 1600
    places = [np.stack([np.cumsum(part) - part, part], axis=1) for part in np.split(lengths, first_of_rank[1:-1])]
    written = [WrittenFiles(places=p, files={name: files[name]}) for p, name in zip(places, files, strict=True)]
    found: dict[str, bytes] = {}
    described, _ = timed(lambda: found.update(describe_boxes(boxes, written)))
    entries = {key: TensorEntry(shape, torch.float32) for key, shape in tensors.items()}
    manifest = Manifest(facts=Facts(engine="", policy=""), tensors=entries, aliases={}, slots={}, files=files)

    def read() -> int:
        stored = DecodedBoxes(found[BOXES], manifest)
        for key in list(stored)[::size]:
            stored[key].check_covered(key)
        mine = ((stored[key], chunk) for key, shape in tensors.items() for chunk in cut(1, size, "rows", shape))
        return sum(len(list(boxes.meeting(chunk))) for boxes, chunk in mine)

    seconds, _ = timed(read)
    return {
        "ranks": size,
        "boxes": sum(map(len, numbers)),
        "planned": planned,
        "described": described,
        "megabytes": len(found[BOXES]) / 1e6,
        "read": seconds,
    }


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


def main() -> None:
    """Print the table for the large model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384], help="made up")
    rows = [measure_large(size) for size in parser.parse_args().ranks]
    print(report.table(rows, LARGE_COLUMNS))


if __name__ == "__main__":
    main()
