"""What saving and loading cost: against plain files, torch's DCP alone and stock Lightning, and while training goes on.

    python -m examples.benchmarks.checkpoint_io

A GPT is trained under a strategy of this package, and under stock Lightning's DDP in the same processes. Between two
steps the ways of saving are run in turn, in another order each time, and so are those of loading; all write the same
bytes (masters and AdamW's state) to the same folder, and read them back from the page cache. Then steps are timed in
rounds that begin with no save, a save that is waited for, and one in the background. At last plans are made for up to
1,024 made-up ranks (`examples.benchmarks.planning`).

Plain files, DCP and this package sync what they write to the disk; stock Lightning does not. This package hashes what
it writes and checks it when it loads; the others do not.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.benchmarks import planning
from examples.benchmarks.step_overhead import build_data, build_model, meet, now
from lightning_shard import registry

ROUNDS = ("no save", "waited for", "in the background")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; sizes are such that a save takes about a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="shard_fsdp", choices=["shard_ddp", "shard_fsdp", "shard_fsdp_offload"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7, help="of each save and each load")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of round")
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2, help="of one process")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256, 512, 1024], help="made up")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written; default: temporary")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the figures go")
    return parser.parse_args(arguments)


class Measured(Callback):
    """Runs everything between the steps of a fit; ``seconds`` has what came of it, by what was timed."""

    def __init__(self, options: argparse.Namespace, stock: Trainer, folder: Path) -> None:
        self.options = options
        self.stock = stock
        self.folder = folder
        self.seconds: dict[str, list[float]] = {}
        self.bytes = 0
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first step makes the optimizer's state; the others are timed."""
        if batch_idx == 1:
            self._compare(trainer, pl_module)
        if batch_idx >= 1:
            self._between_rounds(trainer, batch_idx - 1)
        self._since = now(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Note how long a step took; the first round of each kind warms up."""
        batch_idx = args[-1]
        number = (batch_idx - 1) // self.options.steps
        if number >= len(ROUNDS):
            self._note(f"step, {ROUNDS[number % len(ROUNDS)]}", now(trainer.strategy.root_device) - self._since)

    def _note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def _compare(self, trainer: Trainer, module: LightningModule) -> None:
        tensors = live_tensors(trainer, module)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        saves, loads = ways_to_save(trainer, self.stock, tensors), ways_to_load(trainer, self.stock, tensors)
        for repetition in range(self.options.repetitions + 1):
            for kind, ways in (("save", saves), ("load", loads)):
                names = list(ways)
                for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                    meet()
                    start = now(trainer.strategy.root_device)
                    ways[name](self.folder / name.replace(" ", "-"))
                    meet()
                    if repetition:  # the first warms up
                        self._note(f"{kind}, {name}", now(trainer.strategy.root_device) - start)

    def _between_rounds(self, trainer: Trainer, done: int) -> None:
        if done % self.options.steps:
            return
        number, strategy = done // self.options.steps, trainer.strategy
        start = now(strategy.root_device)
        strategy.finish_saving()
        counts = number >= len(ROUNDS)
        if counts and ROUNDS[(number - 1) % len(ROUNDS)] == "in the background":
            self._note("rest of a save in the background, after its round", now(strategy.root_device) - start)
        kind = ROUNDS[number % len(ROUNDS)]
        if kind == "no save" or number >= (self.options.rounds + 1) * len(ROUNDS):
            return
        strategy.async_save = kind == "in the background"
        meet()
        start = now(strategy.root_device)
        trainer.save_checkpoint(self.folder / "round.ckpt")
        if counts:
            self._note(f"blocked, {kind}", now(strategy.root_device) - start)


def live_tensors(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Masters and optimizer state by name, as the strategy holds them."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    names = {parameter: name for name, parameter in found.items()}
    for parameter, state in trainer.optimizers[0].state.items():
        found |= {f"{names[parameter]}.{slot}": v for slot, v in state.items() if isinstance(v, Tensor) and v.ndim}
    return {name: tensor.detach() for name, tensor in found.items()}


Way = Callable[[Path], Any]


def ways_to_save(trainer: Trainer, stock: Trainer, tensors: dict[str, Tensor]) -> dict[str, Way]:
    """By name, what writes the state to a path; all ranks call it."""

    def plain(path: Path) -> None:
        path.mkdir(exist_ok=True)
        with open(path / f"{dist.get_rank()}.part", "wb") as file:
            for tensor in own_parts(tensors):
                file.write(memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path / f"{dist.get_rank()}.part", path / f"{dist.get_rank()}.bin")

    return {
        "plain files": plain,
        "DCP alone": lambda path: dcp.save(tensors, checkpoint_id=path),
        "stock Lightning, full": lambda path: stock.save_checkpoint(path.with_suffix(".pt")),
        "lightning_shard": lambda path: trainer.save_checkpoint(path),
    }


def ways_to_load(trainer: Trainer, stock: Trainer, tensors: dict[str, Tensor]) -> dict[str, Way]:
    """By name, what reads the state from a path into the live tensors; all ranks call it."""

    def plain(path: Path) -> None:
        with open(path / f"{dist.get_rank()}.bin", "rb") as file:
            for tensor in own_parts(tensors):
                data = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=tensor.dtype)
                tensor.copy_(data.view(tensor.shape))

    def full(path: Path) -> None:
        checkpoint = stock.strategy.load_checkpoint(path.with_suffix(".pt"), weights_only=True)
        stock.strategy.load_model_state_dict(checkpoint)
        stock.strategy.load_optimizer_state_dict(checkpoint)

    def ours(path: Path) -> None:
        trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(path))

    return {
        "plain files": plain,
        "DCP alone": lambda path: dcp.load(tensors, checkpoint_id=path),
        "stock Lightning, full": full,
        "lightning_shard": ours,
    }


def own_parts(tensors: dict[str, Tensor]) -> list[Tensor]:
    """What this rank has to write: its shards, or each of the ranks' share of the replicas, by turns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = [tensor.to_local() for tensor in tensors.values() if isinstance(tensor, DTensor)]
    whole = [tensor for tensor in tensors.values() if not isinstance(tensor, DTensor)]
    return shards + whole[rank::size]


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One process; rank 0 leaves its times in ``folder``."""
    # With LOCAL_RANK there, Lightning takes the processes, and the group that connects them, as they are.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.processes,
        device_id=device,
    )

    def trainer(strategy: Any, steps: int, *callbacks: Callback) -> Trainer:
        return Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=options.processes,
            strategy=strategy,
            max_steps=steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )

    stock = trainer("ddp", 1)
    stock.fit(build_model(options), build_data(options))
    measured = Measured(options, stock, Path(options.folder or folder))
    steps = 2 + (options.rounds + 1) * len(ROUNDS) * options.steps
    trainer(registry.build(options.strategy), steps, measured).fit(build_model(options), build_data(options))
    if rank == 0:
        torch.save({"seconds": measured.seconds, "bytes": measured.bytes}, f"{folder}/times.pt")
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the processes, wait for them and read rank 0's times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(options, folder), nprocs=options.processes)
        return torch.load(f"{folder}/times.pt", weights_only=True)


def table(seconds: dict[str, list[float]], total: int) -> str:
    """Medians and spreads, and throughput where all of the state moved."""
    lines = [f"{'what':<54} {'median':>10} {'min .. max':>22} {'GB/s':>7}"]
    for what, values in sorted(seconds.items()):
        median, spread = statistics.median(values), f"{1e3 * min(values):.0f} .. {1e3 * max(values):.0f} ms"
        rate = f"{total / median / 1e9:.2f}" if what.startswith(("save", "load")) else ""
        lines.append(f"{what:<54} {1e3 * median:>7.1f} ms {spread:>22} {rate:>7}")
    return "\n".join(lines)


def write(seconds: dict[str, list[float]], path: Path) -> None:
    """One row for each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "repetition", "seconds"])
        writer.writerows([what, index, value] for what, values in seconds.items() for index, value in enumerate(values))


def main(arguments: list[str] | None = None) -> None:
    """Measure; print tables, write CSV files and the picture of the planning times."""
    options = parse_arguments(arguments)
    results = run(options)
    print(f"{results['bytes'] / 1e6:.0f} MB on {options.processes} processes, {options.strategy}, {options.device}")
    print(table(results["seconds"], results["bytes"]))
    write(results["seconds"], options.output / "checkpoint_io.csv")
    if options.ranks:
        points = planning.measure(sorted(options.ranks), options.layers, options.width)
        print(planning.table(points))
        planning.write(points, options.output / "checkpoint_planning.csv")
        planning.draw(points, options.output / "checkpoint_planning.png")
    print(f"figures: {options.output}")


if __name__ == "__main__":
    main()
