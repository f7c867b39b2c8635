"""Ranks that watch each other: what one fails of is known to all, and ends those that are stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard import DataError
from lightning_shard.cluster import watch as watching
from lightning_shard.cluster.preflight import Rendezvous, connect_store
from lightning_shard.cluster.traces import Progress
from lightning_shard.cluster.watch import RankWatch
from tests.groups import sampled
from tests.harness import free_port, run_distributed, until


def _watched(case: str, lost_seconds: float = 60.0, folder: Path | None = None) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    box = [free_port()]
    dist.broadcast_object_list(box)
    place = Rendezvous(address="127.0.0.1", port=box[0], rank=rank, world_size=size)
    # Rank 0's store has to outlive the watch.
    store = connect_store(place, 20)
    dist.barrier()
    exits: list[int] = []
    told: dict[str, Any] = {"cause": None}
    printed = io.StringIO()
    if case == "ends":
        faulthandler.disable()
    with contextlib.redirect_stderr(printed):
        watch = RankWatch(place, lost_seconds, folder=folder, grace_seconds=3.5, exit_process=exits.append)
        if not (case == "silent" and rank == 2):
            watch.start_threads()
        if case == "raises" and rank == 1:
            try:
                raise DataError("no such token: 7")
            except DataError as error:
                told["cause"] = watch.report_failure(error)
        elif case == "ends":
            time.sleep(0.5 * rank)
            watch.end_run()
        else:
            deadline = time.monotonic() + 45
            while not exits and rank != 2 and time.monotonic() < deadline:
                time.sleep(0.05)  # stuck, as in a collective
            if case == "raises" and rank == 2:
                # In time: what the failure of rank 1 makes of its own collective.
                time.sleep(2)
                told["cause"] = watch.report_failure(RuntimeError("Connection reset by peer"))
        watch.stop_threads()
        told["tells of crashes"] = faulthandler.is_enabled()
        told["alive"] = watch._speaker.is_alive() or watch._guard.is_alive()
        dist.barrier()
    told |= {"exits": exits, "printed": printed.getvalue()}
    del store
    return told


def test_what_a_rank_raises_ends_the_others() -> None:
    zero, one, two = run_distributed(_watched, 3, "raises")
    assert (one["cause"], one["exits"]) == (None, [])
    assert zero["exits"] == [2]  # that of a mistake, as on the rank that made it
    first, second = (line for line in zero["printed"].splitlines() if line.startswith("[rank 0 on "))
    assert "ends: rank 1 on " in first
    assert re.search(r"failed: DataError: no such token: 7 \(at .*test_watch\.py:\d+, in _watched\)$", first)
    assert "ends where it stands" in second
    # In time, and in one line; the cause comes once more and last, on the rank whose failure it is.
    assert two["exits"] == []
    assert "failed: DataError: no such token: 7" in two["cause"]
    (line,) = two["printed"].splitlines()
    assert line.endswith(f"ends: {two['cause']}")
    (line,) = one["printed"].splitlines()
    assert line.endswith(f"the cause: {two['cause']}")
    # A thread that is in the store while the interpreter ends aborts the process.
    assert not one["alive"]
    assert not two["alive"]


def test_a_rank_that_falls_silent_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "failures" / "123"
    zero, one, _ = run_distributed(_watched, 3, "silent", lost_seconds=3.0, folder=folder)
    assert zero["exits"] == one["exits"] == [1]
    for told in (zero, one):
        assert "rank 2 on " in told["printed"]
        assert "gave no sign of life: killed" in told["printed"]
    # Both were stuck, and wrote what they could before they ended.
    assert {path.name for path in folder.iterdir()} == {"collectives_0", "collectives_1", "rank_0.txt", "rank_1.txt"}
    for rank, told in enumerate((zero, one)):
        assert f"which is in {folder / f'rank_{rank}.txt'}" in told["printed"]
        collectives, stacks = (folder / f"rank_{rank}.txt").read_text().split("\n\n", 1)
        # The object's size, then the object; and the barrier.
        last = [line for line in collectives.splitlines() if "gloo:" in line][-3:]
        assert [line.split()[3] for line in last] == ["gloo:broadcast"] * 2 + ["gloo:barrier"]
        assert all(f"from _watched at {__file__}:" in line for line in last)
        assert "in _watched" in stacks
        record = pickle.loads((folder / f"collectives_{rank}").read_bytes())
        assert record["entries"][-1]["profiling_name"] == "gloo:barrier"


KEEPER = """
import sys, time
from lightning_shard.cluster.preflight import Rendezvous, connect_store
store = connect_store(Rendezvous(address="127.0.0.1", port=int(sys.argv[1]), rank=0, world_size=3), 20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("how", sampled([signal.SIGKILL, signal.SIGSTOP], 1))
def test_ranks_end_in_time_when_rank_0_is_gone(how: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing answers any more, or no call of the store comes back."""
    port, exits = free_port(), []
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(port)], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    keeper.stdout.readline()
    places = [Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=3) for rank in (1, 2)]
    watches = [RankWatch(place, 4.0, grace_seconds=0.5, exit_process=exits.append) for place in places]
    for watch in watches:
        watch.start_threads()
    time.sleep(1.2)
    try:
        keeper.send_signal(how)
        until(lambda: exits == [1, 1], seconds=12)
    finally:
        keeper.kill()
        keeper.communicate()
        for watch in watches:
            watch.stop_threads()
    printed = capfd.readouterr().err
    assert "[rank 1 on " in printed
    assert "] ends: rank 0 was lost, or the network to it: " in printed


def test_ranks_that_end_one_after_the_other_are_not_lost() -> None:
    for told in run_distributed(_watched, 3, "ends"):
        assert (told["cause"], told["exits"], told["printed"], told["alive"]) == (None, [], "", False)
        assert told["tells of crashes"]  # such as what NCCL's watchdog ends


def _stands_still(how: str) -> str:
    """What this rank prints where it alone calls no collective, or another one, than those that wait for it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    box = [free_port()]
    dist.broadcast_object_list(box)
    place = Rendezvous(address="127.0.0.1", port=box[0], rank=rank, world_size=size)
    store = connect_store(place, 20)
    groups = [dist.new_group(), dist.new_group()]
    dist.barrier()
    exits: list[int] = []
    progress = Progress(lambda: 7)
    before, watching.INTERVAL_SECONDS = watching.INTERVAL_SECONDS, 0.3
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        watch = RankWatch(
            place, 60.0, progress=progress, stuck_seconds=2.4, grace_seconds=0.5, exit_process=exits.append
        )
        watch.start_threads()
        alone = rank == 1
        progress.begin_action("run_training_batch")
        progress.begin_action("[Strategy]ShardDDPStrategy." + ("training_step" if alone else "backward"))
        if how == "late" and alone:
            until(lambda: exits, 30)
        other = alone and how == "other"
        first = dist.all_reduce(torch.ones(2 + other), group=groups[other], async_op=True)
        until(lambda: exits, 30)
        if how == "other":
            dist.all_reduce(torch.ones(3 - other), group=groups[not other])
        first.wait()
        watch.stop_threads()
        watching.INTERVAL_SECONDS = before
        dist.barrier()
    del store
    return printed.getvalue()


@pytest.mark.parametrize("how", sampled(["late", "other"], 1))
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(how: str) -> None:
    told = run_distributed(_stands_still, 3, how)
    here = rf"from (_stands_still|until) at {re.escape(str(Path(__file__).parent.parent))}"
    its = r"" if how == "late" else r", where it waits in gloo:all_reduce \[\[3\]\], number 1 of group \d+"
    cause = (
        rf"rank 1 on \S+ has not moved for \d+ s: it is in forward after step 7{its}, {here}\S+\. rank [02] on \S+ is "
        rf"in backward after step 7, where it waits in gloo:all_reduce \[\[2\]\], number 1 of group \d+, {here}"
    )
    for rank in (0, 2):
        assert re.search(rf"^\[rank {rank} on \S+\] ends: {cause}", told[rank], re.MULTILINE), told[rank]
    # Half of the time before, on rank 0; the stack, then the cause last, on the rank itself.
    assert re.match(r"rank 1 on \S+ has not moved for \d+ s", told[0])
    ends, *_stack, last = told[1].splitlines()
    assert ends.endswith("ends where it stands:")
    assert re.search(rf"^\[rank 1 on \S+\] the cause: {cause}", last), told[1]
