"""The process behind :mod:`tests.harness`: waits for calls on a pipe, runs each in a new process group."""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401
import lightning.pytorch  # noqa: F401
import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401  # which compiles a function
from torch.distributed.tensor import debug as dtensor_debug
from transformers.models.llama import modeling_llama  # noqa: F401

import lightning_shard.strategies.deepspeed  # noqa: F401
from tests import stand_in

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the test session ends in whatever way (Linux only)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# The process that the workers are forked from ends with the test session, and they with it.
_die_with_parent()
# Each call ends with a collection, which would go through the million objects of these modules.
gc.collect()
gc.freeze()

# DeepSpeed alone, as some tests run it, replaces them under stage 3 and leaves them so.
FUNCTIONS = {name: getattr(torch.nn.functional, name) for name in ("linear", "embedding")}


def main(connection: Connection, folder: Path, rank: int, environment: dict[str, str]) -> None:
    """Serve calls until the pipe closes."""
    _die_with_parent()
    # A session of its own, so that it can be killed together with its DataLoader workers.
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Else loaders here would start their workers as this process was started, not as Python does by default.
    multiprocessing.set_start_method(None, force=True)
    _redirect_output(str(folder / f"start-{rank}.log"))
    # The C-level handler prints the stacks of all threads even while the main one waits inside gloo.
    with open(folder / f"stacks-{rank}.txt", "w") as stacks:
        faulthandler.enable()  # what a crash was in, into the log of the call
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        if stand_in.chosen():
            stand_in.install()
        connection.send_bytes(b"ready")
        # A seed that the test session had set when this process was started is no other test's.
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _redirect_output(call["log"])
            _serve(connection, call)


def _serve(connection: Connection, call: dict[str, Any]) -> None:
    environment = dict(os.environ)
    os.environ.update(call["environment"])
    os.chdir(call["cwd"])
    try:
        with _process_group(call), warnings.catch_warnings():
            # "once per place" would hide from a test the warnings that an earlier test had seen.
            warnings.simplefilter("always")
            try:
                fn, args, kwargs = pickle.loads(call["payload"])
                outcome = ("result", "returned", _pickled(fn(*args, **kwargs)))
            except BaseException as error:
                outcome = ("error", type(error).__name__, "".join(traceback.format_exception(error)), time.monotonic())
                # Tell at once, ahead of cleaning up, which could wait for other ranks. What was printed is read then.
                _flush()
                connection.send_bytes(pickle.dumps(outcome))
    except BaseException as error:
        outcome = ("error", type(error).__name__, "".join(traceback.format_exception(error)), time.monotonic())
        _flush()
        connection.send_bytes(pickle.dumps(outcome))
    if outcome[0] == "result":
        _reset(environment)
        connection.send_bytes(pickle.dumps(outcome))
    else:
        # The peers' collectives fail as soon as this process's connections are gone.
        os._exit(1)


@contextlib.contextmanager
def _process_group(call: dict[str, Any]) -> Iterator[None]:
    _seed()
    dist.init_process_group(
        stand_in.backend() if stand_in.chosen() else "gloo",
        init_method=f"file://{call['rendezvous']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=call["timeout"]),
    )
    # A rank whose function is quick would close its connections while others are still making theirs.
    dist.barrier()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _reset(environment: dict[str, str]) -> None:
    """Undo what a call may have left: environment, global modes and functions of torch, garbage that holds groups."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    vars(torch.nn.functional).update(FUNCTIONS)
    # DTensor keeps the results of its operators with the mesh that they were first met on; an equal mesh of the
    # next call would be taken for that one, whose process groups are gone.
    dtensor_debug._clear_sharding_prop_cache()
    dtensor_debug._clear_fast_path_sharding_prop_cache()
    torch._dynamo.reset()
    gc.collect()
    _flush()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _pickled(result: Any) -> bytes:
    """With all tensors on the CPU: the test session has no other device."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    table = copyreg.dispatch_table.copy()
    table[torch.Tensor] = lambda t: t.cpu().__reduce_ex__(2)
    table[torch.nn.Parameter] = lambda t: t.cpu().__reduce_ex__(2)
    pickler.dispatch_table = table
    pickler.dump(result)
    return file.getvalue()


def _redirect_output(path: str) -> None:
    _flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
