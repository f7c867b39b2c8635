"""The findings of ``lightning-shard doctor``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard import versions
from lightning_shard.commands import doctor
from lightning_shard.commands.doctor import Rank
from lightning_shard.planning.traffic import Links, links_text, read_links
from tests.groups import sampled
from tests.harness import run_distributed


def _ranks(**changes: dict[str, Any]) -> list[Rank]:
    links = [5.0, 1.0, 5.2, 1.1]
    ranks = []
    for i in range(4):
        settings = {
            "node": f"n{i // 2}",
            "device": "H100",
            "versions": {"torch": "2.13"},
            "sums": True,
            "link": links[i],
            "inside": 4.0 + i,
            "between": 2.0,
        }
        ranks.append(Rank(**{**settings, **changes.get(f"rank{i}", {})}))
    return ranks


def test_the_table() -> None:
    lines = doctor.table(_ranks()).splitlines()
    header = ["node", "ranks", "devices", "python", "torch", "lightning", "inside GB/s", "to next node GB/s"]
    assert re.split("  +", lines[0]) == header
    assert lines[1].split() == ["n0", "0-1", "2", "H100", "-", "2.13", "-", "5.00", "1.00"]
    assert lines[2].split() == ["n1", "2-3", "2", "H100", "-", "2.13", "-", "5.20", "1.10"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank2": {"sums": False}}, "rank 2 (n1): all-reduce or all-gather gave wrong values"),
        (
            {"rank3": {"link": 0.1}},
            "slow link: rank 3 (n1) to rank 0 (n0) has 0.10 GB/s, the median of its kind is 0.55",
        ),
        ({"rank1": {"device": "A100"}}, "n0: device is A100, elsewhere H100"),
    ],
)
def test_oddities(changes: dict[str, Any], says: str) -> None:
    assert doctor.find_oddities(_ranks()) == []
    assert doctor.find_oddities(_ranks(**changes)) == [says]


def test_links_for_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    one_node = [replace(rank, between=0.0) for rank in _ranks()[2:]]
    alone = [replace(one_node[0], inside=0.0)]
    for ranks, expected in ((_ranks(), (4e9, 2e9)), (one_node, (6e9, None)), (alone, (None, None))):
        path.write_text(links_text(doctor.slowest_speeds(ranks)))
        found = read_links(path)
        assert (found.intra_node, found.inter_node) == expected


@pytest.mark.matrix
def test_a_process_alone_writes_that_it_has_no_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "newer_than_tested", lambda: {"torch": "9.1"})
    path = tmp_path / "links.json"
    assert doctor.main(["--backend", "gloo", "--megabytes", "1", "--output", str(path)], {}) == 0
    printed = capsys.readouterr().out
    assert f"links: {path}" in printed
    assert f"untested: torch 9.1, tested is {versions.tested('torch')}: a fit checks its numbers" in printed
    links = read_links(path)
    assert links == Links(intra_node=None, inter_node=None, device=links.device)
    assert set(links.device) == {"products", "single", "memory", "host", "launch"}
    assert min(links.device.values()) > 0
    before = path.read_bytes()
    for refused, says in ((path, "exists: choose another path"), (tmp_path / "none" / "links.json", "no folder")):
        assert doctor.main(["--backend", "gloo", "--output", str(refused)], {}) == 2
        assert says in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_node_with_fewer_ranks() -> None:
    ranks = [Rank(node=n, device="cpu", versions={}, sums=True, link=1.0) for n in ("n0", "n0", "n1", "n1", "n2")]
    assert doctor.find_oddities(ranks) == ["n2: number of ranks on its node is 1, elsewhere 2"]


def test_whose_rendezvous_it_is() -> None:
    point, local = doctor.rendezvous_of({})
    assert (point.rank, point.world_size, local) == (0, 1, 0)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    point, local = doctor.rendezvous_of(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    # The world's size is in it, as where nodes come or go the count of restarts stays.
    assert (point.address, point.port, point.rank, point.world_size) == ("a", 29500, 3, 4)
    assert (point.agent, local) == ("0-4", 1)
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    point, local = doctor.rendezvous_of(srun | {"SLURM_JOB_NODELIST": "n[08-09]"})
    assert (point.address, point.port, point.rank, point.world_size) == ("n08", 15000 + 7 * 131 + 1, 3, 4)
    assert (point.agent, local) == (None, 1)


def _pairs(broken: bool) -> tuple[bool, float]:
    gather = dist.all_gather
    if broken:
        dist.all_gather = lambda parts, own: [part.copy_(own) for part in parts]
    try:
        return doctor._adds_up(torch.device("cpu")), doctor._measure_link(torch.device("cpu"))
    finally:
        dist.all_gather = gather


@pytest.mark.parametrize("broken", sampled([True, False], 0))
def test_values_and_pairs_are_looked_at(broken: bool) -> None:
    for adds_up, speed in run_distributed(_pairs, 2, broken):
        assert adds_up is not broken
        assert speed > 0
