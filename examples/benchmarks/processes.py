"""Fresh processes with a process group, and how much memory they take."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import re
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lightning_shard.devices import cores

MEBIBYTE = 2**20

PRELOAD = [
    "deepspeed",
    "lightning.pytorch",
    "lightning_shard.strategies.deepspeed",
    "lightning_shard.strategies.ddp",
    "lightning_shard.strategies.fsdp",
    "examples.benchmarks.python_loops",
    "examples.benchmarks.trainers",
]
"""Imported once for all processes on CPUs: they start in no time, with the memory of a run."""


class Failed(RuntimeError):
    """Processes failed. The message is the reason in a line."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank and device of a process."""

    rank: int
    device: torch.device

    def now(self) -> float:
        """Seconds on a clock, once the device has nothing left to do."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def meet(self) -> None:
        """Let all ranks begin together."""
        dist.barrier()


def run_processes(
    function: Callable[..., Any], *arguments: Any, processes: int, device: str, timeout: float = 1200.0
) -> list[Any]:
    """``function(place, *arguments)`` in new processes with a process group. Returns the results by rank.

    Raises:
        Failed: one of them raised or was killed, or the time was up.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        started = _start(function, arguments, processes, device, folder, free)
        deadline = time.monotonic() + timeout
        try:
            while not started.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise Failed(f"it did not end in {timeout:g} s")
        except Failed:
            raise
        except Exception as error:
            raise Failed(reason(error)) from error
        finally:
            for process in started.processes:
                process.kill()
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(processes)]


class Team:
    """Processes that were started together, and are asked and answer by pipes of their own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, processes: int, device: str) -> None:
        """Begin ``function(place, pipes, *arguments)``, which uses the pipe of its rank and closes the others."""
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(processes)), strict=True)
        self._pipes: list[Connection] = list(ours)
        self._folder, self._free = tempfile.TemporaryDirectory(), socket.socket()
        given = (theirs, *arguments)
        self._started = _start(function, given, processes, device, self._folder.name, self._free)
        for pipe in theirs:
            pipe.close()

    def ask(self, question: Any, *, seconds: float) -> list[Any]:
        """The ranks' answers to a question to all.

        Raises:
            Failed: one of them raised or was killed, or the time was up.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # its end is seen below
                pipe.send(question)
        return self.hear(seconds=seconds)

    def hear(self, *, seconds: float) -> list[Any]:
        """Each rank's next message. Raises as `ask`."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self._pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait([*silent], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"it did not end in {seconds:g} s")
            for pipe in ready:
                try:
                    answers[silent[pipe]] = pipe.recv()  # type: ignore[index,union-attr]
                except (EOFError, ConnectionResetError):
                    raise Failed(self._reason()) from None
        return [answers[rank] for rank in sorted(answers)]

    def _reason(self) -> str:
        try:
            self._started.join(timeout=30)
        except Exception as error:
            return reason(error)
        return "one of its processes ended"

    def end(self, *, seconds: float = 0.0) -> None:
        """End the processes, those that do not within some seconds by force."""
        with contextlib.suppress(Exception):
            self._started.join(timeout=seconds)
        for process in self._started.processes:
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._free.close()
        self._folder.cleanup()


def _start(
    function: Callable[..., Any], arguments: Any, processes: int, device: str, folder: str, free: socket.socket
) -> Any:
    _prepare(processes, device)
    # A process that was forked can't use a CUDA that its parent has looked at.
    method = "forkserver" if device == "cpu" else "spawn"
    free.bind(("localhost", 0))  # no one listens at it: the processes meet over a file
    given = (function, arguments, processes, device, folder, free.getsockname()[1])
    return start_processes(_run, given, nprocs=processes, join=False, start_method=method)


def _prepare(processes: int, device: str) -> None:
    """The state that new processes inherit."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        multiprocessing.set_forkserver_preload(PRELOAD)


def reason(error: BaseException) -> str:
    """The last line of an error's message or traceback, without the module of the exception's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = re.sub(r"^(?:\w+\.)+(?=\w+: )", "", lines[-1]) if lines else type(error).__name__
    return last if len(last) <= 300 else last[:297] + "..."


def _run(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    processes: int,
    device: str,
    folder: str,
    port: int,
) -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "torch", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The variables of launchers such as torchrun: Lightning and Accelerate take processes and group as they are.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        NODE_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    on_device = device != "cpu"
    place = Place(rank=rank, device=torch.device(device, rank) if on_device else torch.device("cpu"))
    if on_device:
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}" if on_device else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=processes,
        device_id=place.device if on_device else None,
    )
    result = function(place, *arguments)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    place.meet()
    # Engines, threads and groups that are left end with the process, in no order.
    sys.stdout.flush()
    os._exit(0)


class PeakMemory:
    """The peak memory of this process above its first one: on GPUs tensors', on CPUs the process's."""

    def __init__(self, place: Place) -> None:
        """Begin to watch."""
        self._device = place.device if place.device.type != "cpu" else None
        gc.collect()
        if self._device is not None:
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._before = torch.accelerator.memory_allocated(self._device)
        else:
            _give_freed_memory_back()
            # proc(5): 5 resets the peak resident set size.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")

    def bytes(self) -> int:
        """The peak so far, in bytes."""
        own = self._device
        now = _status("VmHWM") if own is None else torch.accelerator.max_memory_allocated(own)
        return int(now) - self._before


def _give_freed_memory_back() -> None:
    """Let the C library return every freed tensor, so that resident memory is the used memory.

    By itself glibc keeps memory for later use, depending on the order in which it was freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # malloc.h: -3 is M_MMAP_THRESHOLD. Setting it ends its growth, too (mallopt(3)).
        mallopt(-3, 64 * 1024)


def free_memory() -> int:
    """Bytes that new processes of this host can have. The page cache gives way to them (proc(5))."""
    return _status("MemAvailable", "/proc/meminfo")


def _status(field: str, path: str = "/proc/self/status") -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {field}")
