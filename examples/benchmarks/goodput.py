"""The share of time that a run trains which is killed again and again, and the time from a kill to the next step.

    python -m examples.benchmarks.goodput --kills 100 --seconds 15 --csv goodput.csv

Under each engine a run is started, killed a while after each attempt's first step (exponentially distributed,
`--seconds` on average, by `--seed`) and started again with ``ckpt_path: auto`` until it has ended. Then the next run
begins, until there were `--kills`. SIGKILL hits in turn a rank other than 0, rank 0 and all ranks of the
node, half of the times while a checkpoint is being written.

The run that was killed must end with the weights of one that never was, to the last bit, and may never go on from
before the last checkpoint that was whole when it was killed. The effective training time is the steps of the run times
their median time, divided by all the time that it took. The table also has the estimate of arXiv 2410.21680
without queues, ``(1 - f (u + t / 2)) / (1 + u / R)``: ``f`` failures in a second, ``u`` seconds from a failure to the
first new step, ``t`` seconds between two checkpoints, ``R`` seconds of training of a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ENGINES = ("shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2")
KINDS = ("rank", "rank 0", "node", "rank in a save", "rank 0 in a save", "node in a save")
RANKS = 2
LOST_SECONDS = 10.0
PHASES = ("others end", "imports", "connect", "set-up and load", "first step")


@dataclass(frozen=True, kw_only=True)
class Options:
    engine: str
    steps: int
    every: int  # steps between two checkpoints
    step_seconds: float
    depth: int


@dataclass
class Record:
    """The measurements of one engine."""

    engine: str
    kinds: list[str] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)  # of each restart, in the order of `PHASES`
    seconds: float = 0.0  # of all runs
    effective: float = 0.0
    lost_steps: list[int] = field(default_factory=list)
    interval: float = 0.0
    runs: int = 0

    def row(self) -> dict[str, Any]:
        between = [statistics.mean(times) for times in zip(*self.phases, strict=True)] if self.phases else []
        overhead = statistics.mean(sum(times) for times in self.phases) if self.phases else 0.0
        rate = len(self.kinds) / self.seconds
        return {
            "engine": self.engine,
            "kills": len(self.kinds),
            "effective": self.effective / self.seconds,
            "estimate": (1 - rate * (overhead + self.interval / 2)) / (1 + overhead * self.runs / self.effective),
            "lost": statistics.mean(self.lost_steps or [0]),
            "restart": overhead,
            **dict(zip(PHASES, between, strict=False)),
        }


def work(options: Options, folder: str) -> None:
    """Train as a rank, and write the times of steps to a file."""
    log = (Path(folder) / f"events-{os.environ['RANK']}").open("a", buffering=1)

    def say(event: str, step: int = 0) -> None:
        log.write(json.dumps([event, step, time.time()]) + "\n")

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_shard
    from lightning_shard.registry import build

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(options.depth)]
            self.net = nn.Sequential(*layers, nn.Linear(64, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(options.step_seconds)
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Events(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            say("connect")

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            say("set-up and load", trainer.global_step)

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            say("step", trainer.global_step)

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            sha = hashlib.sha256()
            for name, _ in pl_module.named_parameters():
                sha.update(name.encode() + lightning_shard.full_tensor(trainer, name).numpy().tobytes())
            say(sha.hexdigest(), trainer.global_step)

    say("imports")
    torch.set_num_threads(1)
    seed_everything(3)
    draw = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(96, 64, generator=draw), torch.randn(96, 1, generator=draw))
    saves = ModelCheckpoint(f"{folder}/checkpoints", "{step}", every_n_train_steps=options.every, save_top_k=1)
    strategy = build(
        options.engine, preemption=lightning_shard.PreemptionConfig(run="goodput"), lost_rank_seconds=LOST_SECONDS
    )
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=options.steps, callbacks=[Events(), saves],
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch_size=4, shuffle=True), ckpt_path="auto")


def events(folder: Path) -> list[tuple[str, int, float]]:
    """The lines that rank 0 has written."""
    path = folder / "events-0"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def start(options: Options, folder: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "goodput", "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "examples.benchmarks.goodput", "--work", json.dumps(vars(options)), str(folder)]
    ranks = []
    for rank in range(RANKS):
        environ = {**os.environ, **{name: str(value) for name, value in common.items()}}
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log-{rank}").open("ab") as log:
            ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
    return ranks


def wait(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} took over {seconds:g} s")
        time.sleep(0.01)


def has_ended(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(rank.poll() is not None for rank in ranks)


def run(options: Options, folder: Path, kinds: list[str], draw: random.Random, mean: float, record: Record) -> str:
    """Run once with the kills of ``kinds``, which are removed as they happen. Returns the digest of the weights."""
    folder.mkdir(parents=True)
    begin, killed_at, whole = time.time(), 0.0, 0
    while True:
        seen, started = len(events(folder)), time.time()
        ranks = start(options, folder)

        def steps(since: int = seen) -> list[tuple[str, int, float]]:
            return [event for event in events(folder)[since:] if event[0] == "step"]

        wait(lambda: steps() or has_ended(ranks), 600, "the first step")  # noqa: B023
        reached = {name: when for name, _, when in reversed(events(folder)[seen:])}
        if killed_at and "step" in reached:
            resumed = next(step for name, step, _ in events(folder)[seen:] if name == "set-up and load")
            if resumed < whole:
                raise SystemExit(f"{options.engine} went on from step {resumed}, but step {whole} was saved")
            times = [killed_at, started, *(reached[name] for name in (*PHASES[1:4], "step"))]
            record.phases.append([after - before for before, after in pairwise(times)])
            record.lost_steps.append(max(step for name, step, _ in events(folder)[:seen] if name == "step") - resumed)
        kind = kinds[0] if kinds else ""
        until = time.monotonic() + draw.expovariate(1 / mean) if kind else float("inf")
        wait(lambda: has_ended(ranks) or time.monotonic() >= until, 3600, "the run")  # noqa: B023
        if kind.endswith("in a save"):
            wait(lambda: has_ended(ranks) or [*folder.glob("checkpoints/.*.tmp-*")], 600, "a save")  # noqa: B023
        if has_ended(ranks):
            break
        whole = max(
            (int(path.parent.stem.split("=")[1]) for path in folder.glob("checkpoints/[!.]*/manifest.json")), default=0
        )
        victims = ranks if kind.startswith("node") else ranks[:1] if kind.startswith("rank 0") else ranks[1:]
        killed_at = time.time()
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        wait(lambda: has_ended(ranks), 60, f"the end of the others after a kill of {kind}")  # noqa: B023
        record.kinds.append(kinds.pop(0))
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{options.engine} failed: {(folder / 'log-0').read_text(errors='replace')[-3000:]}")
    said = events(folder)
    lasted = [b[2] - a[2] for a, b in pairwise(said) if a[0] == b[0] == "step"]
    record.seconds += time.time() - begin
    record.runs += 1
    record.effective += options.steps * statistics.median(lasted)
    record.interval = options.every * statistics.median(lasted)
    return next(name for name, *_ in said if len(name) == 64)


def soak(engines: Sequence[str], *, kills: int, mean: float, seed: int, steps: int, every: int = 10) -> list[Record]:
    """`kills` under the engines in turn. SystemExit if a run ends with other weights, too late or not at all."""
    records = []
    for index, engine in enumerate(engines):
        options = Options(engine=engine, steps=steps, every=every, step_seconds=0.1, depth=4)
        count = kills // len(engines) + (index < kills % len(engines))
        left, draw, record = [KINDS[i % len(KINDS)] for i in range(count)], random.Random(seed + index), Record(engine)
        with tempfile.TemporaryDirectory(prefix="goodput-") as name:
            straight = run(options, Path(name) / "straight", [], draw, mean, Record(engine))
            number = 0
            while left:
                number += 1
                digest = run(options, Path(name) / f"run-{number}", left, draw, mean, record)
                if digest != straight:
                    raise SystemExit(
                        f"{engine}: the weights of a run that was killed are not those of one that was not"
                    )
        records.append(record)
        print(
            f"{engine}: {len(record.kinds)} kills, weights of {record.runs} runs bitwise those of the run without",
            flush=True,
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kills", type=int, default=100, help="of all engines together")
    add("--seconds", type=float, default=15.0, help="from an attempt's first step to its kill, on average")
    add("--steps", type=int, default=200, help="of a run")
    add("--every", type=int, default=10, help="steps between two checkpoints")
    add("--engines", nargs="+", default=ENGINES)
    add("--seed", type=int, default=0)
    add("--csv", type=Path)
    add("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Options(**json.loads(given.work[0])), given.work[1])
        return
    wanted = {
        "kills": given.kills,
        "mean": given.seconds,
        "seed": given.seed,
        "steps": given.steps,
        "every": given.every,
    }
    from examples.benchmarks import report  # imports torch, which the supervisor does not need

    rows = [record.row() for record in soak(given.engines, **wanted)]
    headings = {"engine": "", "kills": "kills", "effective": "effective", "estimate": "estimate", "lost": "steps lost"}
    print(report.table(rows, {**headings, "restart": "restart, s", **{phase: f"{phase}, s" for phase in PHASES}}))
    print(f"{report.environment('cpu')}; load {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    if given.csv:
        report.write_csv(rows, given.csv)


if __name__ == "__main__":
    main()
