"""``lightning-shard doctor``: check the processes of a job before a run, and print everything odd."""

import argparse
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_shard.checkpoint.files.manifest import library_versions
from lightning_shard.cluster.network import prepare_gloo
from lightning_shard.cluster.preflight import Rendezvous, attempt_of, compare_ranks, connect_store
from lightning_shard.cluster.slurm_job import Launch, meeting_point, read_job
from lightning_shard.commands.options import add_output, count, options_parser, refuse_to_replace, write_output
from lightning_shard.devices import accelerator, name_of, visible
from lightning_shard.errors import ConfigurationError
from lightning_shard.planning.traffic import Links, links_text
from lightning_shard.ranks import Ranks, set_timeout
from lightning_shard.text import columns
from lightning_shard.versions import newer_than_tested, tested

_DESCRIPTION = """\
Check the processes of a job, started as the run would be: srun lightning-shard doctor, torchrun -m lightning_shard
doctor. All processes meet, compare versions, see whether --folder is shared, add and gather tensors, and measure the
links between neighbouring ranks, one after the other, and all together in all-gathers. --output writes these speeds
for lightning-shard plan, with the speeds of a device's products, memory and link to the host. Prints a table with a
line for each node, and everything odd.
"""

_PAIR_MEGABYTES = 16  # Sent between two neighbours, and gathered on CPUs.
SLOW = 0.5  # A link is slow below this part of the median of its kind.


@dataclass(frozen=True, kw_only=True)
class Rank:
    node: str
    device: str
    versions: Mapping[str, str]
    sums: bool = False  # True if all-reduce and all-gather gave the right values.
    link: float = 0.0  # GB/s to the next rank, 0 for a process alone.
    inside: float = 0.0  # GB/s of a device to others of its node in all-gathers, 0 if it is alone there.
    between: float = 0.0  # GB/s of a node to others in all-gathers, 0 if there is one node.
    reached: Mapping[str, float] = field(default_factory=dict)  # As `Links.device`.


def parser() -> argparse.ArgumentParser:
    parser = options_parser("doctor", _DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, help="folder that all nodes are to share, such as the run's default_root_dir")
    add("--seconds", type=float, default=120.0, help="how long a process may be late (default: 120)")
    add("--megabytes", type=count, help="size of the gathered tensor (default: 256 on GPUs, else 16)")
    add_output(parser, "speeds of all-gathers in and between nodes, for plan --links FILE")
    add("--backend", choices=["gloo", "nccl"], help="backend (default: nccl if there are GPUs)")
    return parser


def rendezvous_of(environ: Mapping[str, str]) -> tuple[Rendezvous, int]:
    """Return the launcher's rendezvous and the local rank. Without a launcher it is a rendezvous of one process."""
    if "RANK" not in environ:
        job = read_job(environ)
        if job is None or not job.uses_srun:
            return Rendezvous(address="127.0.0.1", port=0, rank=0, world_size=1), 0
        meet = meeting_point(job, Launch(nodes=1, devices=1, launcher="slurm", gpu=False), environ)
        local = environ.get("SLURM_LOCALID", "0")
        own = {"RANK": str(job.rank), "WORLD_SIZE": str(job.tasks or 1), "LOCAL_RANK": local}
        environ = {**meet, **environ, **own}
    at = Rendezvous(
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        agent=attempt_of(environ, int(environ["WORLD_SIZE"])),
    )
    return at, int(environ.get("LOCAL_RANK", "0"))


def examine_processes(at: Rendezvous, local_rank: int, options: argparse.Namespace) -> list[Rank]:
    """Compare and measure. Return every rank's results. All ranks call it.

    ConfigurationError: the ranks can't meet, or differ.
    """
    seconds, found = options.seconds, accelerator() if options.backend != "gloo" else None
    gpu = found is not None
    device = torch.device("cpu") if found is None else torch.device(found.type, local_rank % visible())
    own = Rank(node=socket.gethostname(), device=name_of(device), versions=library_versions())
    if at.world_size == 1:
        return [replace(own, sums=True, reached=_measure_device(device))]
    store = connect_store(at, seconds)
    compare_ranks(store, at, {"node": own.node, "versions": own.versions}, seconds, options.folder)
    store.set_timeout(timedelta(seconds=seconds))
    prepare_gloo(at.address, os.environ, gpu=gpu)
    if gpu:
        # Collectives of objects use the current device, by default the first one in every process.
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        options.backend or dist.get_default_backend_for_device(device),
        store=store,
        rank=at.rank,
        world_size=at.world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device if gpu else None,
    )
    try:
        own = replace(own, sums=_adds_up(device), link=_measure_link(device), reached=_measure_device(device))
        nodes = [rank.node for rank in _gather_over_gloo(own, seconds)]
        inside, between = _measure_gathers(device, options.megabytes or (256 if gpu else _PAIR_MEGABYTES), nodes)
        return _gather_over_gloo(replace(own, inside=inside, between=between), seconds)
    finally:
        dist.destroy_process_group()


def _gather_over_gloo(seen: Rank, seconds: float) -> list[Rank]:
    """Gather every rank's results over gloo, which runs on GPUs need too."""
    set_timeout(timedelta(seconds=seconds))
    try:
        return Ranks.of().gather(seen)
    except RuntimeError as error:
        listens = os.environ.get("GLOO_SOCKET_IFNAME", "the interface that the host's name resolves to")
        raise ConfigurationError(
            f"[rank {dist.get_rank()} on {seen.node}] gloo, over which ranks exchange objects, can't connect them: it "
            f"listens on {listens}. Set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes. ({error})"
        ) from error


def _adds_up(device: torch.device) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.full((1024,), float(rank), device=device)
    dist.all_reduce(total)
    parts = [torch.empty(16, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.full((16,), float(rank), device=device))
    expected = size * (size - 1) / 2
    return bool((total == expected).all()) and all(bool((part == i).all()) for i, part in enumerate(parts))


def _measure_link(device: torch.device) -> float:
    """Measure GB/s from this rank to the next, while no other rank sends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.zeros(_PAIR_MEGABYTES << 18, device=device)
    speed = 0.0
    for sender in range(size):
        receiver = (sender + 1) % size
        for repeat in range(3):  # the first opens the connection
            dist.barrier()
            start = time.perf_counter()
            if rank == sender:
                dist.send(data, receiver)
                dist.recv(data[:1], receiver)
                float(data[0])
                seconds = time.perf_counter() - start
                speed = max(speed, data.nbytes / seconds / 1e9) if repeat else 0.0
            elif rank == receiver:
                dist.recv(data, sender)
                dist.send(data[:1], sender)
    return speed


def _measure_gathers(device: torch.device, megabytes: int, nodes: Sequence[str]) -> tuple[float, float]:
    """Measure GB/s in all-gathers, of a device to its node and of its node to others, by the formulas of plan."""
    of_node = {name: [i for i, node in enumerate(nodes) if node == name] for name in nodes}
    groups = {name: dist.new_group(ranks) for name, ranks in of_node.items()}
    speeds = []
    for group in (groups[nodes[dist.get_rank()]], dist.group.WORLD):
        size = dist.get_world_size(group)
        part = torch.zeros((megabytes << 18) // size, device=device)
        full = part.new_empty(size * part.numel())
        gather = partial(dist.all_gather_single, full, part, group)
        seconds = [_measure_seconds(device, gather) for _ in range(4)][1:]  # once connected
        speeds.append((size - 1) * part.nbytes / min(seconds) / 1e9)
    return speeds[0], speeds[1] if len(groups) > 1 else 0.0


def _measure_device(device: torch.device) -> dict[str, float]:
    """Measure the speeds of a device alone, as `lightning_shard.planning.operators.Device` names them."""
    size, count = (8192, 1 << 28) if device.type != "cpu" else (1024, 1 << 27)
    data, tiny = torch.zeros(count, dtype=torch.uint8, device=device), torch.zeros(8, device=device)
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def launches() -> None:
        for _ in range(1000):
            tiny.add_(1)

    def fastest(act: Callable[[], object]) -> float:
        return min(_measure_seconds(device, act) for _ in range(4))

    found = {}
    for name, dtype in (("products", torch.bfloat16), ("single", torch.float32)):
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        found[name] = 2 * size**3 / fastest(partial(torch.mm, matrix, matrix))
    found["memory"] = 2 * count / fastest(data.clone)
    found["host"] = count / fastest(partial(data.copy_, host, non_blocking=True))
    return {**found, "launch": fastest(launches) / 1000}


def _measure_seconds(device: torch.device, act: Callable[[], object]) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    events = [torch.Event(device, enable_timing=True) for _ in range(2)]
    events[0].record()
    act()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def table(ranks: Sequence[Rank]) -> str:
    """Return a table with ranks, devices, versions and links of each node."""
    libraries = ("python", "torch", "lightning")
    rows: list[tuple[str, ...]] = [("node", "ranks", "devices", *libraries, "inside GB/s", "to next node GB/s")]
    for node in dict.fromkeys(rank.node for rank in ranks):
        own = [i for i, rank in enumerate(ranks) if rank.node == node]
        consecutive = len(own) > 1 and own[-1] - own[0] == len(own) - 1
        span = f"{own[0]}-{own[-1]}" if consecutive else ",".join(map(str, own))
        devices = ", ".join(f"{n} {device}" for device, n in Counter(ranks[i].device for i in own).items())
        versions = [ranks[own[0]].versions.get(name, "-") for name in libraries]
        speeds = [[kind[i] for i in own if i in kind] for kind in _links(ranks).values()]
        rows.append((node, span, devices, *versions, *(f"{min(each):.2f}" if each else "-" for each in speeds)))
    return columns(rows)


def find_oddities(ranks: Sequence[Rank]) -> list[str]:
    """Return a line for each wrong value, slow link, differing device or differing number of ranks."""
    wrong = "all-reduce or all-gather gave wrong values"
    found = [f"rank {i} ({rank.node}): {wrong}" for i, rank in enumerate(ranks) if not rank.sums]
    for links in _links(ranks).values():
        median = statistics.median(links.values()) if links else 0.0
        for i, link in links.items():
            if link < SLOW * median:
                following = (i + 1) % len(ranks)
                found.append(
                    f"slow link: rank {i} ({ranks[i].node}) to rank {following} ({ranks[following].node}) has "
                    f"{link:.2f} GB/s, the median of its kind is {median:.2f}"
                )
    for fact, values in (
        ("device", [rank.device for rank in ranks]),
        ("number of ranks on its node", [sum(r.node == rank.node for r in ranks) for rank in ranks]),
    ):
        usual, others = statistics.mode(values), dict[str, object]()
        for rank, value in zip(ranks, values, strict=True):
            if value != usual:
                others.setdefault(rank.node, value)
        found += [f"{node}: {fact} is {other}, elsewhere {usual}" for node, other in others.items()]
    return found


def untested_versions() -> list[str]:
    """Return a line for each library newer than the tested versions, which is not odd."""
    return [
        f"untested: {library} {version}, tested is {tested(library)}: a fit checks its numbers, as selftest does"
        for library, version in newer_than_tested().items()
    ]


def slowest_speeds(ranks: Sequence[Rank]) -> Links:
    inside = min((1e9 * rank.inside for rank in ranks if rank.inside), default=None)
    between = min((1e9 * rank.between for rank in ranks if rank.between), default=None)
    seen = {name: [rank.reached[name] for rank in ranks] for name in ranks[0].reached}
    device = {name: max(values) if name == "launch" else min(values) for name, values in seen.items()}
    return Links(intra_node=inside, inter_node=between, device=device)


def _links(ranks: Sequence[Rank]) -> dict[str, dict[int, float]]:
    """Return GB/s of the links inside and between nodes, by the rank that sends."""
    links: dict[str, dict[int, float]] = {"inside": {}, "between": {}}
    for i, rank in enumerate(ranks):
        following = ranks[(i + 1) % len(ranks)]
        if following is not rank:
            links["inside" if rank.node == following.node else "between"][i] = rank.link
    return links


def main(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Return the exit code: 0 if nothing is odd, 1 if something is, 2 if the processes can't meet or differ."""
    options = parser().parse_args(arguments)
    at, local_rank = rendezvous_of(os.environ if environ is None else environ)
    try:
        refuse_to_replace(options.output if at.rank == 0 else None, options.force)
        ranks = examine_processes(at, local_rank, options)
    except ConfigurationError as error:
        # Rank 0 prints an error of all ranks. An error of one rank begins with its number.
        if at.rank == 0 or str(error).startswith("["):
            print(f"error: {error}", file=sys.stderr)
        return 2
    found = list(find_oddities(ranks))
    if at.rank == 0:
        print(table(ranks))
        print("".join(f"{line}\n" for line in untested_versions()), end="")
        links = slowest_speeds(ranks)
        shown = {"of a device inside its node": links.intra_node, "of a node to others": links.inter_node}
        print("".join(f"all-gather: {speed / 1e9:.2f} GB/s {of}\n" for of, speed in shown.items() if speed), end="")
        alone = "one process alone, so that nothing between processes was checked: start it by srun or torchrun"
        print("\n".join(f"odd: {line}" for line in found) or ("nothing is odd" if at.world_size > 1 else alone))
        if options.output is not None:
            write_output(options.output, links_text(links), options.force)
            print(f"links: {options.output}")
    return 1 if found else 0
