"""What a training step costs under this package's strategies, against hand-written DDP and FSDP2 loops.

    python -m examples.benchmarks.step_overhead

Both have the same model, data, optimizer, schedule, dtypes and shard units, and live in the same processes. They
run in turn: a block of steps of the hand-written loop, a block of the Trainer's, and so on. Each block of the Trainer
is compared with the mean of the two hand-written blocks around it, so that a machine that slows down over time does
not count as overhead. A Trainer's step is everything between two batches' starts: its hooks, logging calls,
scheduler and data loading are in.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_shard  # noqa: F401  (registers the strategies)
from examples.gpt import GPT, learning_rate_factor
from examples.python_corpus import PythonCorpus

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()


@dataclass(frozen=True)
class Round:
    """Seconds per step of one block of the Trainer and of the hand-written blocks before and after it."""

    before: float
    trainer: float
    after: float

    @property
    def by_hand(self) -> float:
        """Mean of the hand-written blocks, in seconds per step."""
        return (self.before + self.after) / 2

    @property
    def ratio(self) -> float:
        """Trainer over hand-written; 1.0 is no overhead."""
        return self.trainer / self.by_hand


def parse_arguments() -> argparse.Namespace:
    """The command line; sizes are such that a step takes more than 300 ms on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["shard_ddp", "shard_fsdp"], metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of the Trainer")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each that do not count")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4, help="of one process")
    parser.add_argument("--output", type=Path, default=Path("runs/step_overhead.csv"))
    return parser.parse_args()


def build_model(options: argparse.Namespace) -> GPT:
    """The model that both train, from one seed."""
    seed_everything(1, verbose=False)
    return GPT(layers=options.layers, heads=options.heads, width=options.width, max_length=options.seq_len)


def build_data(options: argparse.Namespace) -> PythonCorpus:
    """The data that both read; ``setup`` has run."""
    data = PythonCorpus(seq_len=options.seq_len, batch_size=options.batch_size)
    data.setup("fit")
    return data


def shard_by_hand(model: GPT, strategy: str, precision: str, device: torch.device) -> nn.Module:
    """What a user of torch writes in place of the strategy."""
    policy = BF16 if precision == "bf16-mixed" else FP32
    transformer = model.model.to(device)
    if "fsdp" in strategy:
        for block in transformer.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(transformer, mp_policy=policy)
    if precision == "32-true":
        return DistributedDataParallel(transformer)
    # DistributedDataParallel has no master weights; torch's FSDP2-based replicate is its equal with them.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    for block in transformer.blocks:
        replicate(block, mesh=mesh, mp_policy=policy)
    return replicate(transformer, mesh=mesh, mp_policy=policy)


def loop_by_hand(options: argparse.Namespace, strategy: str, device: torch.device) -> Callable[[], None]:
    """A hand-written training loop; each call of what is returned takes one step."""
    model = build_model(options)
    forward = shard_by_hand(model, strategy, options.precision, device)
    data = build_data(options)
    loader = DataLoader(
        data.train,
        batch_size=options.batch_size,
        sampler=DistributedSampler(data.train, seed=1),
        drop_last=True,
    )
    h = model.hparams
    norms = {id(p) for m in model.modules() if not isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if id(p) not in norms], "weight_decay": h.weight_decay},
            {"params": [p for p in parameters if id(p) in norms], "weight_decay": 0.0},
        ],
        lr=h.learning_rate,
        betas=(h.beta1, h.beta2),
    )
    total = count_steps(options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step, warmup_steps=h.warmup_steps, total_steps=total, final=h.final_learning_rate
        ),
    )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    stream = batches()

    def step() -> None:
        inputs, targets = (tensor.to(device) for tensor in next(stream))
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()

    return step


def count_steps(options: argparse.Namespace) -> int:
    """Steps of the Trainer: its blocks, and one batch more whose start ends the last."""
    return options.warmup + options.rounds * options.steps + 1


class InTurn(Callback):
    """Runs a block of the hand-written loop between two blocks of the Trainer's steps, and times both."""

    def __init__(self, step_by_hand: Callable[[], None], options: argparse.Namespace) -> None:
        self.step_by_hand = step_by_hand
        self.options = options
        self.by_hand: list[float] = []
        self.trainer: list[float] = []
        self._start = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warm the hand-written loop up; the Trainer's first steps warm it."""
        for _ in range(self.options.warmup):
            self.step_by_hand()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """At the border of two blocks: close the Trainer's, run one by hand, open the next."""
        done = batch_idx - self.options.warmup
        if done < 0 or done % self.options.steps:
            return
        device = trainer.strategy.root_device
        if done:
            self.trainer.append((now(device) - self._start) / self.options.steps)
        meet()
        start = now(device)
        for _ in range(self.options.steps):
            self.step_by_hand()
        self.by_hand.append((now(device) - start) / self.options.steps)
        meet()
        self._start = now(device)


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def meet() -> None:
    """Let all ranks begin a block together."""
    dist.barrier()


def measure(rank: int, options: argparse.Namespace, strategy: str, folder: str) -> None:
    """One process: trains under ``strategy`` and by hand in turn; rank 0 leaves its times in ``folder``."""
    # With LOCAL_RANK there, Lightning takes the processes, and the group that connects them, as they are.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.processes,
        device_id=device if on_gpu else None,
    )
    turns = InTurn(loop_by_hand(options, strategy, device), options)
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=options.processes,
        strategy=strategy,
        precision=options.precision,
        max_steps=count_steps(options),
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(build_model(options), build_data(options))
    if rank == 0:
        torch.save({"by_hand": turns.by_hand, "trainer": turns.trainer}, f"{folder}/times.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def run(options: argparse.Namespace, strategy: str) -> list[Round]:
    """Start the processes, wait for them and read rank 0's times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(options, strategy, folder), nprocs=options.processes)
        times = torch.load(f"{folder}/times.pt", weights_only=True)
    hand = times["by_hand"]
    return [
        Round(before=before, trainer=trainer, after=after)
        for before, trainer, after in zip(hand, times["trainer"], hand[1:], strict=False)
    ]


def write(results: dict[str, list[Round]], path: Path) -> None:
    """One row for each round, in seconds per step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "round", "by_hand_before", "trainer", "by_hand_after", "ratio"])
        for strategy, rounds in results.items():
            for index, r in enumerate(rounds):
                writer.writerow([strategy, index, r.before, r.trainer, r.after, r.ratio])


def table(results: dict[str, list[Round]]) -> str:
    """Medians over the rounds, and the spread of the ratios."""
    lines = [f"{'strategy':<24} {'by hand':>10} {'Trainer':>10} {'ratio':>8}  {'spread of the ratios'}"]
    for strategy, rounds in results.items():
        by_hand = 1e3 * statistics.median(r.by_hand for r in rounds)
        trainer = 1e3 * statistics.median(r.trainer for r in rounds)
        ratios = [r.ratio for r in rounds]
        lines.append(
            f"{strategy:<24} {by_hand:>7.1f} ms {trainer:>7.1f} ms {statistics.median(ratios):>8.4f}"
            f"  {min(ratios):.4f} .. {max(ratios):.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every strategy that was asked for; print a table and write the rounds as CSV."""
    options = parse_arguments()
    parameters = sum(p.numel() for p in build_model(options).parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {options.processes} processes on {options.device},"
        f" {options.batch_size} x {options.seq_len} tokens each, {options.precision},"
        f" {options.rounds} rounds of {options.steps} steps"
    )
    results = {strategy: run(options, strategy) for strategy in options.strategies}
    write(results, options.output)
    print(table(results))
    print(f"rounds: {options.output}")


if __name__ == "__main__":
    main()
