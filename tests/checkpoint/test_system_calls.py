"""A save, a removal and a link that are killed at each of their calls of the system, or in which each call fails.

strace (Debian's package) does both, to a fork of a process that has everything imported.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import commit
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import ROOT

CALLS = (
    "openat mkdir rename renameat renameat2 unlink unlinkat rmdir write fsync symlink flock newfstatat getdents64 lseek"
    " close read"
)
OTHERS = ("site-packages", "/python", "write(%d,")  # versions of packages, and what the process tells its parent

Action = Callable[[Path], None]


def aside(folder: Path) -> None:
    """Save where names can't be exchanged."""
    commit._exchange = lambda *_: False  # type: ignore[assignment] # in a process of its own
    save_number(folder / "a.ckpt", 2.0)


# What is done, the path that is looked at, and the numbers that may be found there; None: there is nothing.
ACTIONS: dict[str, tuple[Action, str, set[float | None]]] = {
    "save": (lambda folder: save_number(folder / "a.ckpt", 2.0), "a.ckpt", {1.0, 2.0}),
    "aside": (aside, "a.ckpt", {1.0, 2.0}),
    "remove": (lambda folder: commit.remove_checkpoint(folder / "a.ckpt"), "a.ckpt", {1.0, None}),
    "file": (lambda folder: save_number(folder / "a.full.ckpt", 2.0, saver=Saver()), "a.full.ckpt", {1.0, 2.0}),
    "remove a file": (lambda folder: commit.remove_checkpoint(folder / "a.full.ckpt"), "a.full.ckpt", {1.0, None}),
    "link": (lambda folder: commit.link_checkpoint(folder / "b.ckpt", folder / "last.ckpt"), "last.ckpt", {1.0, 2.0}),
}


def prepare(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_number(folder / "a.ckpt", 1.0)
    save_number(folder / "b.ckpt", 2.0)
    save_number(folder / "a.full.ckpt", 1.0, saver=Saver())
    commit.link_checkpoint(folder / "a.ckpt", folder / "last.ckpt")


def number_at(path: Path) -> float:
    """`number_in`, also of one file."""
    if not path.is_file():
        return number_in(path)
    tensors = torch.load(path, weights_only=True)["state_dict"]
    (number,) = {float(value) for name, tensor in tensors.items() if name.startswith("w") for value in tensor}
    return number


def traced(action: Action, folder: Path, inject: str | None = None) -> tuple[str, str]:
    """What a fork says of ``action``: nothing (it was killed), "done" or its error; and its calls."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            action(folder)
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(tell, said.encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(tell)
    os.waitpid(child, os.WUNTRACED)
    given = [f"--inject={inject}"] if inject else []
    watched = f"--trace={CALLS.replace(' ', ',')}"
    log = folder.parent / "trace"
    with subprocess.Popen(["strace", "-qq", "-o", str(log), watched, *given, "-p", str(child)]):
        while "TracerPid:\t0" in Path(f"/proc/{child}/status").read_text():
            time.sleep(0.002)
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)
    said = os.read(ready, 1 << 16).decode()
    os.close(ready)
    return said, log.read_text()


def calls(log: str) -> Iterator[tuple[str, int]]:
    """Each call's name, and the how manieth of that name it is."""
    seen: Counter[str] = Counter()
    for line in log.splitlines():
        if found := re.match(r"(\d+ +)?(\w+)\(", line):
            seen[found[2]] += 1
            if not any(other in line for other in OTHERS) and '"done"' not in line:
                yield found[2], seen[found[2]]


def at_every_call(name: str, fault: str, root: str) -> None:
    """Print what was wrong, and at last how often each outcome was; in a process of its own, for its forks."""
    torch.set_num_threads(1)
    action, looked_at, allowed = ACTIONS[name]
    folder, outcomes = Path(root) / "folder", Counter[str]()
    prepare(folder)
    said, log = traced(action, folder)
    assert said == "done", said
    for call, number in calls(log):
        prepare(folder)
        said, _ = traced(action, folder, f"{call}:{fault}:when={number}")
        where = f"{name}, {fault} in {call} {number} ({said})"
        try:
            found: object = number_at(folder / looked_at)
        except CheckpointNotFoundError:
            found = None
        except CheckpointError as error:
            found = str(error)
        outcomes[said.partition(":")[0]] += 1
        if found not in allowed:
            print(f"{where}: {found} is there")
        if said == "done" and found == 1.0:
            print(f"{where}: it was said to be done")
        if said and not said.startswith(("done", "CheckpointError", "CheckpointCorruptError", "OSError")):
            print(f"{where}: another error")
        # The next save works, and leaves nothing.
        action(folder)
        save_number(folder / looked_at, 3.0, saver=Saver())
        left = [entry for entry in os.listdir(folder) if entry.startswith(".")]
        if left or number_at(folder / looked_at) != 3.0:
            print(f"{where}: {left} is left after the next save")
    print(dict(outcomes), file=sys.stderr)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("fault", ["signal=SIGKILL", "error=EIO", "error=ENOSPC"])
@pytest.mark.parametrize("name", [*ACTIONS])
def test_at_every_call(tmp_path: Path, name: str, fault: str) -> None:
    call = f"at_every_call({name!r}, {fault!r}, {str(tmp_path)!r})"
    code = f"from tests.checkpoint.test_system_calls import at_every_call; {call}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    print(done.stderr)
