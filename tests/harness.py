"""Run a function on several real gloo processes and get every rank's result, or every rank's traceback.

The processes of a world size are started by its first call and serve all later calls. A call that fails, hangs
or loses a rank costs its processes; the next one gets new ones. Importing torch, Lightning and DeepSpeed costs
seconds, so that all of them are forked from one process that has done it (:mod:`multiprocessing`'s forkserver).
Each call has a new process group, environment and working directory (temporary, common to all ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# How long the other ranks may take to end by themselves after the first one failed, so that their tracebacks
# are shown too: gloo tells the peers of a lost connection at once.
STACKS_SECONDS = 10.0  # for a process on a machine under load to write its stacks
GRACE_SECONDS = 5.0
# Imports of torch and Lightning on a busy machine.
START_SECONDS = 300.0
LOG_TAIL_LINES = 60
# Process groups in caches of torch, DTensor and DeepSpeed leave threads of gloo behind. Each wakes every 10 ms
# (gloo's transport/tcp/loop.cc). A new worker is a fork, but its own caches are empty: 20 took 1.7 times as long.
MOST_THREADS = 100
# Read by torch when it is imported.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class DistributedError(AssertionError):
    """At least one rank raised, died or did not end in time; the message has a section for every rank."""

    def __init__(self, message: str, failed: dict[int, str]) -> None:
        super().__init__(message)
        self.failed = failed


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Call ``fn``, pickled by reference, on `world_size` processes with an initialised group; results by rank."""
    payload = pickle.dumps((fn, args, kwargs))
    pool = _POOLS.get(world_size)
    if pool is None or not pool.alive():
        if pool is not None:
            pool.kill()
        pool = _POOLS[world_size] = _Pool(world_size)
    try:
        results = pool.call(payload, timeout, getattr(fn, "__qualname__", str(fn)))
        if pool.threads() > MOST_THREADS:
            _POOLS.pop(world_size).kill()
        return results
    except BaseException:
        # A KeyboardInterrupt leaves ranks in the middle of a call just as a failure does.
        _POOLS.pop(world_size, None)
        pool.kill()
        raise


def close_pools() -> None:
    """End all worker processes."""
    while _POOLS:
        _POOLS.popitem()[1].kill()


class _Pool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"harness-{world_size}-"))
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []
        self.calls = 0
        for rank in range(world_size):
            self._spawn(rank)
        deadline = time.monotonic() + START_SECONDS
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())) or not self._is_ready(connection):
                tail = _tail(self.folder / f"start-{rank}.log")
                self.kill()
                raise DistributedError(f"worker {rank} of {world_size} did not start\n{tail}", {rank: "died"})

    def _spawn(self, rank: int) -> None:
        ours, theirs = Pipe()
        environment = {
            **os.environ,
            **_ONE_THREAD,
            "PYTHONPATH": _joined_path(),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Each rank compiles by itself: a shared cache would make a test depend on who is first, and on what
            # earlier runs on this machine left there.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor-{rank}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        process = _context().Process(target=_work, args=(theirs, str(self.folder), rank, environment))
        process.start()
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)

    @staticmethod
    def _is_ready(connection: Connection) -> bool:
        try:
            return connection.recv_bytes() == b"ready"
        except (EOFError, OSError):
            return False

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def threads(self) -> int:
        """Threads of the first worker, 0 on systems that do not list them."""
        return len(list(Path(f"/proc/{self.processes[0].pid}/task").glob("*")))

    def call(self, payload: bytes, timeout: float, name: str) -> list[Any]:
        self.calls += 1
        folder = self.folder / f"call-{self.calls}"
        cwd = folder / "cwd"
        cwd.mkdir(parents=True)
        world_size = len(self.processes)
        port = free_port()
        for rank, connection in enumerate(self.connections):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world_size,
                "GROUP_RANK": 0,
                "GROUP_WORLD_SIZE": 1,
                "ROLE_RANK": rank,
                "ROLE_WORLD_SIZE": world_size,
                "TORCHELASTIC_RUN_ID": "harness",
                "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_MAX_RESTARTS": 0,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            call = {
                "payload": payload,
                "environment": {key: str(value) for key, value in environment.items()},
                "cwd": str(cwd),
                "rendezvous": str(folder / "rendezvous"),
                "log": str(folder / f"rank-{rank}.log"),
                # The harness's own clock must be the first to run out: it shows where all ranks are.
                "timeout": timeout + 60,
            }
            connection.send_bytes(pickle.dumps(call))
        outcomes = self._collect(time.monotonic() + timeout)
        failed = {rank: outcome[1] for rank, outcome in outcomes.items() if outcome[0] != "result"}
        if failed:
            raise DistributedError(self._report(name, timeout, outcomes, folder), failed)
        shutil.rmtree(folder, ignore_errors=True)
        return [pickle.loads(outcomes[rank][2]) for rank in range(world_size)]

    def _collect(self, deadline: float) -> dict[int, tuple[Any, ...]]:
        """Rank -> (kind, what happened, data, for an error also when); kind is result, error, died or hung."""
        outcomes: dict[int, tuple[Any, ...]] = {}
        waiting = dict(enumerate(self.connections))
        while waiting and time.monotonic() < deadline:
            # Read before asking whether the process lives: what it sent before its end counts.
            ready = wait(list(waiting.values()), timeout=0.1)
            for rank, connection in list(waiting.items()):
                if connection in ready:
                    outcomes[rank] = self._receive(rank, connection)
                elif not self.processes[rank].is_alive() and not connection.poll():
                    outcomes[rank] = ("died", "died", self._exit_status(rank))
                else:
                    continue
                del waiting[rank]
                if outcomes[rank][0] != "result":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting:
            for rank, stack in self._stacks(list(waiting)).items():
                outcomes[rank] = ("hung", "did not end", stack)
        return outcomes

    def _receive(self, rank: int, connection: Connection) -> tuple[Any, ...]:
        try:
            outcome: tuple[Any, ...] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return "died", "died", self._exit_status(rank)
        return outcome

    def _exit_status(self, rank: int) -> str:
        self.processes[rank].join(timeout=5)
        code = self.processes[rank].exitcode
        if code is None:
            return "closed its pipe"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The Python stacks of ranks that are still in the call (the worker has faulthandler on SIGUSR2)."""
        asked = [rank for rank in ranks if self.processes[rank].is_alive()]
        for rank in asked:
            pid = self.processes[rank].pid
            assert pid is not None  # it was started; 0 would be the test session's own group
            os.kill(pid, signal.SIGUSR2)
        files = {rank: self.folder / f"stacks-{rank}.txt" for rank in ranks}
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and not all(files[rank].stat().st_size for rank in asked):
            time.sleep(0.1)
        time.sleep(0.5)  # the rest of them
        return {rank: _tail(path, 200) or "no Python stacks were written" for rank, path in files.items()}

    def _report(self, name: str, timeout: float, outcomes: dict[int, tuple[Any, ...]], folder: Path) -> str:
        # What died comes before those whose connections to it broke, what raised before what waited for it.
        order = {"died": 0, "error": 1, "hung": 2, "result": 3}
        ranks = sorted(outcomes, key=lambda rank: (order[outcomes[rank][0]], *outcomes[rank][3:], rank))
        kind, what, data = outcomes[ranks[0]][:3]
        head = f"{name} on {len(outcomes)} processes did not end within {timeout} s"
        if kind in ("died", "error"):
            # The line of the exception itself, which starts with its type's name, qualified or not.
            lines = [line for line in data.splitlines() if kind == "error" and line.split(":")[0].endswith(what)]
            last = data if kind == "died" else lines[-1] if lines else what
            head = f"{name} on {len(outcomes)} processes failed; rank {ranks[0]}: {last}"
        parts = [head]
        for rank in ranks:
            kind, what, data = outcomes[rank][:3]
            if kind == "result":
                parts.append(f"--- rank {rank}: returned")
                continue
            parts.append(f"--- rank {rank}: {'raised' if kind == 'error' else kind} {what}\n{data}")
            if log := _tail(folder / f"rank-{rank}.log"):
                parts.append(f"--- rank {rank}: end of its output\n{log}")
        return "\n".join(parts)

    def kill(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            assert process.pid is not None  # it was started; group 0 would be the test session's own
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _work(connection: Connection, folder: str, rank: int, environment: dict[str, str]) -> None:
    # Not imported by the test session, which has no use for all that comes with it.
    from tests import harness_worker

    harness_worker.main(connection, Path(folder), rank, environment)


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Starts processes as forks of one that has imported :mod:`tests.harness_worker`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness_worker"])
    outer = dict(os.environ)
    os.environ.update(_ONE_THREAD, PYTHONPATH=_joined_path())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(outer)
    return context


def _joined_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives out; each worker of ``-n`` has its range."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10000 + 2000 * (worker % 10) + random.SystemRandom().randrange(2000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], object], seconds: float = 90) -> None:
    """Wait for the condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.02)


def _tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines, or those around a crash: what was said before it, its signal, and the threads' stacks."""
    if not path.exists():
        return ""
    printed = path.read_text(errors="replace").splitlines()
    crash = next((i for i, line in enumerate(printed) if line.startswith("Fatal Python error")), None)
    first = max(len(printed) - lines, 0) if crash is None else max(crash - lines // 4, 0)
    return "\n".join(printed[first : first + lines])


_POOLS: dict[int, _Pool] = {}
atexit.register(close_pools)
