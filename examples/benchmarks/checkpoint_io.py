"""The cost of saves and loads, against plain files, torch's DCP and stock Lightning, also during training.

    python -m examples.benchmarks.checkpoint_io                              # two CPU processes
    python -m examples.benchmarks.checkpoint_io --device cuda --size 1B --folder /scratch/here

One model is trained under a strategy of this package and under stock Lightning's DDP, in the same processes. Between
two steps the ways of saving take turns, in another order each time, and so do the ways of loading. All write the same
masters and AdamW state to the same folder, and read them back from the page cache. Plain files, DCP and this package
sync their files to the disk, stock Lightning does not. This package alone hashes its files, and checks them on loading.

Then steps are timed in rounds that begin with no save, with one that is waited for, with one in the background, and
with ``dcp.async_save`` of the same tensors. At last plans are made for made-up ranks (`examples.benchmarks.planning`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.benchmarks import planning, report
from examples.benchmarks.llama import SIZES
from examples.benchmarks.processes import Place, run_processes
from examples.benchmarks.trainers import TrainerLoop
from examples.benchmarks.workload import Workload, add_arguments, describe, workload_of

Way = Callable[[Path], Any]
Seconds = dict[str, list[float]]

BY_DCP = "a save by DCP in the background"
ROUNDS = ("no save", "a save that is waited for", "a save in the background", BY_DCP)
COLUMNS = {"what": "", "ms": "median ms", "spread": "smallest..largest", "rate": "GB/s"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--strategy", default="shard_fsdp", choices=["shard_ddp", "shard_fsdp", "shard_fsdp_offload"])
    parser.add_argument("--repetitions", type=int, default=7, help="of each save and each load")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of round")
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 512, 1024], help="made up")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints (default: a temporary folder)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    return parser.parse_args(arguments)


def measure(place: Place, work: Workload, options: argparse.Namespace, folder: Path) -> tuple[Seconds, int]:
    """Seconds by name of the timed part, and the bytes of the state. All ranks call it."""
    steps = 1 + (options.rounds + 1) * len(ROUNDS) * options.steps
    stock = TrainerLoop("lightning_ddp", work, place, steps=1)
    ours = TrainerLoop(options.strategy, work, place, steps=steps)
    for loop in (stock, ours):
        loop.run(1)  # which makes the optimizer's state
    tensors = live_tensors(ours.trainer)
    saves = ways_to_save(ours.trainer, stock.trainer, tensors)
    loads = ways_to_load(ours.trainer, stock.trainer, tensors)
    seconds: Seconds = {}
    for repetition in range(options.repetitions + 1):
        for kind, ways in (("save", saves), ("load", loads)):
            names = list(ways)
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                place.meet()
                start = place.now()
                ways[name](folder / name.replace(" ", "-"))
                place.meet()
                if repetition:  # the first warms up
                    seconds.setdefault(f"{kind}, {name}", []).append(place.now() - start)
    for number in range((options.rounds + 1) * len(ROUNDS)):
        found = one_round(place, ours, tensors, ROUNDS[number % len(ROUNDS)], options.steps, folder / "round.ckpt")
        for what, value in found.items() if number >= len(ROUNDS) else ():
            seconds.setdefault(what, []).append(value)
    stock.end()
    ours.end()
    return seconds, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def one_round(
    place: Place, loop: TrainerLoop, tensors: dict[str, Tensor], kind: str, steps: int, path: Path
) -> dict[str, float]:
    """Save, or not, and take steps."""
    found: dict[str, float] = {}
    strategy: Any = loop.trainer.strategy
    finish: Callable[[], object] | None = None
    place.meet()
    start = place.now()
    if kind == BY_DCP:
        finish = dcp.async_save(tensors, checkpoint_id=path.with_suffix(".dcp")).result
    elif kind != "no save":
        strategy.async_save = kind == "a save in the background"
        loop.trainer.save_checkpoint(path)
        finish = strategy.finish_saving if strategy.async_save else None
    if kind != "no save":
        found[f"training waits, {kind}"] = place.now() - start
    start = place.now()
    loop.run(steps)
    found[f"a step after {kind}"] = (place.now() - start) / steps
    if finish is not None:
        start = place.now()
        finish()
        found[f"left to write after these steps, {kind}"] = place.now() - start
    strategy.async_save = False
    return found


def live_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Masters and optimizer state by name, as the strategy holds them."""
    found: dict[str, Tensor] = dict(trainer.lightning_module.named_parameters())
    names = {parameter: name for name, parameter in found.items()}
    for parameter, state in trainer.optimizers[0].state.items():
        found |= {f"{names[parameter]}.{slot}": v for slot, v in state.items() if isinstance(v, Tensor) and v.ndim}
    return {name: tensor.detach() for name, tensor in found.items()}


def own_parts(tensors: dict[str, Tensor]) -> list[Tensor]:
    """The tensors that this rank has to write: its shards, or its share of the replicas, by turns."""
    shards = [tensor.to_local() for tensor in tensors.values() if isinstance(tensor, DTensor)]
    whole = [tensor for tensor in tensors.values() if not isinstance(tensor, DTensor)]
    return shards + whole[dist.get_rank() :: dist.get_world_size()]


def ways_to_save(trainer: Trainer, stock: Trainer, tensors: dict[str, Tensor]) -> dict[str, Way]:
    """Functions by name that write the state to a path. All ranks call them."""

    def plain(path: Path) -> None:
        path.mkdir(exist_ok=True)
        part = path / f"{dist.get_rank()}.part"
        with part.open("wb") as file:
            for tensor in own_parts(tensors):
                file.write(memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
        part.rename(part.with_suffix(".bin"))

    return {
        "plain files": plain,
        "DCP alone": lambda path: dcp.save(tensors, checkpoint_id=path),
        "stock Lightning, one file": lambda path: stock.save_checkpoint(path.with_suffix(".pt")),
        "lightning_shard": trainer.save_checkpoint,
    }


def ways_to_load(trainer: Trainer, stock: Trainer, tensors: dict[str, Tensor]) -> dict[str, Way]:
    """Functions by name that read the state from a path into the live tensors. All ranks call them."""

    def plain(path: Path) -> None:
        with (path / f"{dist.get_rank()}.bin").open("rb") as file:
            for tensor in own_parts(tensors):
                data = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=tensor.dtype)
                tensor.copy_(data.view(tensor.shape))

    def one_file(path: Path) -> None:
        checkpoint = stock.strategy.load_checkpoint(path.with_suffix(".pt"), weights_only=True)
        stock.strategy.load_model_state_dict(checkpoint)
        stock.strategy.load_optimizer_state_dict(checkpoint)

    return {
        "plain files": plain,
        "DCP alone": lambda path: dcp.load(tensors, checkpoint_id=path),
        "stock Lightning, one file": one_file,
        "lightning_shard": lambda path: trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(path)),
    }


def rows_of(seconds: Seconds, total: int) -> list[report.Row]:
    """Medians and spreads in milliseconds, and the throughput if all of the state moved."""
    rows = []
    for what, values in seconds.items():
        median = statistics.median(values)
        row = {"what": what, "ms": 1e3 * median, "spread": f"{1e3 * min(values):.4g}..{1e3 * max(values):.4g}"}
        if what.startswith(("save, ", "load, ")):
            row["rate"] = total / median / 1e9
        rows.append({**row, "seconds": " ".join(f"{value:.6f}" for value in values)})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, write CSV files and the picture of the planning times."""
    options = parse_arguments(arguments)
    if options.size is None and options.device == "cpu":
        options.size = "25M"
    work = workload_of(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        seconds, total = run_processes(measure, work, options, folder, processes=work.processes, device=work.device)[0]
    rows = rows_of(seconds, total)
    print(report.environment(work.device))
    print(f"{describe(work)}, {options.strategy}, {total / 1e6:.0f} MB of masters and optimizer state")
    print(report.table(rows, COLUMNS))
    report.write_csv(rows, options.output / "checkpoint_io.csv")
    if options.ranks:
        points = planning.measure(sorted(options.ranks), SIZES["125M"].layers, SIZES["125M"].width)
        print(report.table(planning.rows_of(points), planning.COLUMNS))
        report.write_csv(planning.rows_of(points), options.output / "checkpoint_planning.csv")
        planning.draw(points, options.output / "checkpoint_planning.png")


if __name__ == "__main__":
    main()
