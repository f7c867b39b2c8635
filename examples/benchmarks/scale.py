"""The messages between ranks of a large run, measured with simulated ranks against one real store.

    python examples/benchmarks/scale.py --ranks 64 256 1024 4096 16384 --csv scale.csv --plot scale.png

A simulated rank runs this package's own code for a rank, over a connection of its own, but many share a process. Each
step is measured from 64 ranks on, against its limit: *preflight* is the comparison before the process group, *beats* an
interval in which all ranks say that they live and one looks at all, *lost rank* the time from a rank's last sign of
life to the moment at which all others know its name (after ``lost_rank_seconds``, 120), *lost connection* the time in
which all ranks learn who is silent after each has lost a connection. CPU seconds are all processes' together, the
store's included. Descriptors are rank 0's.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError

from lightning_shard.cluster import preflight
from lightning_shard.cluster.preflight import Rendezvous, compare_ranks, connect_store
from lightning_shard.cluster.watch import RankWatch

BARS = {"preflight, CPU s": 60.0, "beats, s": None, "lost rank, s": 120.0, "lost connection, s": 30.0}
LOST_SECONDS = 120.0
PER_PROCESS = 2048  # simulated ranks
FACTS = {
    "node": "n",
    "versions": {f"library{i}": "1.2.3" for i in range(12)},
    "settings": {f"s{i}": "x" * 20 for i in range(60)},
}


class Clock:
    """CPU seconds of this process since the last call."""

    def __init__(self) -> None:
        self._last = self._now()

    def __call__(self) -> float:
        now = self._now()
        took, self._last = now - self._last, now
        return took

    @staticmethod
    def _now() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def _each(ranks: Sequence[Any], call: Callable[[Any], Any], threads: int = 8) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, ranks))


def exchange(watch: RankWatch) -> None:
    """A rank's messages in an interval. Like a rank, without an answer in time it goes on with the next."""
    with contextlib.suppress(DistStoreError):
        watch._exchange_words()


def _compare(stores: Sequence[Any], places: Sequence[Rendezvous]) -> None:
    _each(range(len(places)), lambda i: compare_ranks(stores[i], places[i], FACTS, 300), threads=len(places))


def made_up(connection: Connection, port: int, first: int, count: int, size: int) -> None:
    """Run some ranks in a process of its own, by orders over the pipe. The answer is its CPU seconds."""
    threading.stack_size(256 * 1024)
    # An address for each process: one has 28,000 ports for connections to another.
    address = f"127.0.0.{1 + first // PER_PROCESS}"
    places = [Rendezvous(address=address, port=port, rank=first + i, world_size=size) for i in range(count)]
    stores: list[Any] = []
    watches: list[RankWatch] = []
    clock = Clock()
    for order in iter(connection.recv, "end"):
        clock()
        if order == "connect":
            # A connection waits a few times for the other end, and costs little.
            stores = _each(places, lambda place: connect_store(place, 300), threads=128)
        elif order == "compare":
            _compare(stores, places)
            stores.clear()
        elif order == "watch":
            watches = _each(places, lambda place: RankWatch(place, LOST_SECONDS, exit_process=os._exit), threads=128)
        elif order == "suspect":
            for watch in watches:
                watch._suspects = True
        elif order == "beat":
            # The last rank of all is the one that is lost.
            _each([w for w in watches if w._rank < size - 1], exchange, threads=16)
        connection.send((clock(), all(watch._cause is not None for watch in watches if watch._rank < size - 1)))


class Ranks:
    """All ranks but 0, which is this process."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.zero = Rendezvous(address="127.0.0.1", port=port, rank=0, world_size=size)
        self.store = connect_store(self.zero, 300)
        self.pipes: list[Connection] = []
        context = get_context("forkserver")
        context.set_forkserver_preload(["lightning_shard.cluster.watch"])
        for first in range(1, size, PER_PROCESS):
            here, there = context.Pipe()
            arguments = (there, port, first, min(PER_PROCESS, size - first), size)
            context.Process(target=made_up, args=arguments, daemon=True).start()
            self.pipes.append(here)

    def do(self, order: str, own: Callable[[], Any] = lambda: None) -> tuple[float, float, bool]:
        """Seconds, CPU seconds of all, and whether all know of a failure."""
        clock, start = Clock(), time.monotonic()
        for pipe in self.pipes:
            pipe.send(order)
        own()
        answers = [pipe.recv() for pipe in self.pipes]
        return time.monotonic() - start, clock() + sum(cpu for cpu, _ in answers), all(known for _, known in answers)

    def rounds(self, watch: RankWatch) -> float:
        """Beat at intervals until all know of a failure. Returns the seconds."""
        start, known = time.monotonic(), False
        while not known:
            begin = time.monotonic()
            known = self.do("beat", lambda: exchange(watch))[2]
            time.sleep(max(0.0, watch._interval - (time.monotonic() - begin)) if not known else 0)
        return time.monotonic() - start

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")


def measure(size: int, *, lost_rank: bool) -> dict[str, Any]:
    """All steps at this number of ranks."""
    row: dict[str, Any] = {"ranks": size}
    ranks = Ranks(size)
    ranks.do("connect")
    took = ranks.do("compare", lambda: compare_ranks(ranks.store, ranks.zero, FACTS, 300))
    row |= {"preflight, s": took[0], "preflight, CPU s": took[1]}
    print(f"{size} ranks compared: {took[0]:.1f} s, {took[1]:.1f} CPU s", file=sys.stderr, flush=True)
    watch = RankWatch(ranks.zero, LOST_SECONDS, exit_process=os._exit)
    ranks.do("watch")
    ranks.do("beat", lambda: exchange(watch))
    took = ranks.do("beat", lambda: exchange(watch))
    row |= {"beats, s": took[0], "beats, CPU s": took[1], "interval, s": watch._interval}
    row["descriptors"] = len(os.listdir("/proc/self/fd"))
    if lost_rank:
        row["lost rank, s"] = ranks.rounds(watch)
    else:
        ranks.do("suspect")
        row["lost connection, s"] = ranks.rounds(watch)
    ranks.end()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    preflight._CONNECTIONS = 1  # the made-up ranks close one before they open the next
    # torch's store looks up the name of everyone who connects, one after the other.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture, by matplotlib")
    parser.add_argument(
        "--skip-lost-rank", action="store_true", help="which takes two minutes for each number of ranks"
    )
    options = parser.parse_args(arguments)
    rows = []
    for size in options.ranks:
        row = measure(size, lost_rank=False)
        if not options.skip_lost_rank:
            row["lost rank, s"] = measure(size, lost_rank=True)["lost rank, s"]
        rows.append({name: round(value, 2) for name, value in row.items()})
        print(
            ", ".join(f"{name} {value}" for name, value in rows[-1].items()),
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if options.plot is not None:
        draw(rows, options.plot)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each step: the measured curve and its limit, 830 pixels wide."""
    from matplotlib import pyplot

    titles = {
        "preflight, CPU s": ("comparison of settings before the start", "CPU seconds of all processes"),
        "beats, s": ("signs of life of all ranks, once", "seconds"),
        "lost rank, s": ("until all ranks know the name of a lost one", "seconds"),
        "lost connection, s": ("the same after each lost its connection", "seconds"),
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(8.3, 5.6), sharex=True)
    sizes = [row["ranks"] for row in rows]
    for axis, (name, bar) in zip(axes.flat, BARS.items(), strict=True):
        title, unit = titles[name]
        measured = [row for row in rows if name in row]
        limits = [row["interval, s"] if bar is None else bar for row in rows]
        axis.loglog([row["ranks"] for row in measured], [row[name] for row in measured], marker="o", label="measured")
        axis.loglog(sizes, limits, linestyle="--", color="grey", label="limit")
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(unit)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.set_ylim(min(0.5 * min(row[name] for row in measured), 1), 2 * max(limits))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right")
    for axis in axes[1]:
        axis.set_xlabel("number of ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
