"""End a command after an error: one rank prints a user's mistake, a bug is raised, all children are ended."""

import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_shard._lightning import processes
from lightning_shard.cluster.traces import package_of, user_frame, words_of
from lightning_shard.commands.options import UsageError
from lightning_shard.errors import ShardError, chain

MISTAKE_EXIT_CODE = 2
# Ranks other than 0 wait before they print a mistake: rank 0 has most often made the same one, prints it first, and
# ends the others.
_SILENCE_SECONDS = 2.0
# Rank 0 waits for the children's own messages before it ends them.
_LAST_WORDS_SECONDS = 4.0


def end_command(error: Exception, trainer: Any, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """End the children. Print a user's mistake on one rank and exit with code 2. Return if ``error`` is to be raised.

    ``trainer`` is None if none was built. ``--traceback`` in ``arguments`` prints the frames of a mistake.
    """
    children = processes.take_children(trainer)
    if not is_mistake(error):
        # A lost child breaks this rank's collectives. The child's own message is the cause then.
        if MISTAKE_EXIT_CODE in wait_for_children(children, _LAST_WORDS_SECONDS):
            raise SystemExit(MISTAKE_EXIT_CODE) from error
        terminate_children(children)
        return
    if not getattr(error, "said", False):  # printed by the rank that failed first
        if rank := global_rank(environ):
            time.sleep(_SILENCE_SECONDS)
        sys.stdout.flush()
        # Of a module that can't be imported the parser keeps only the message, so take the frame of its cause.
        inner = (one for one in chain(error) if one is not error and isinstance(one, ImportError))
        where = user_frame(error) or next(map(user_frame, inner), None)
        raised, who = f"\n(raised in {where})" if where else "", f"[rank {rank}] " if rank else ""
        print(f"{who}error: {words_of(error)}{raised}", file=sys.stderr, flush=True)
    terminate_children(children)
    if "--traceback" in arguments:
        traceback.print_exception(error)
    raise SystemExit(MISTAKE_EXIT_CODE) from error


def global_rank(environ: Mapping[str, str]) -> int:
    """Read the global rank from the launcher's variables, 0 without a launcher.

    ``RANK`` is torchrun's. ``LOCAL_RANK`` of Lightning's children comes before SLURM's variables, since they may run
    inside a SLURM step of one task.
    """
    if "RANK" in environ:
        return int(environ["RANK"])
    if "LOCAL_RANK" in environ:
        local_world = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        return int(environ.get("NODE_RANK", "0")) * local_world + int(environ["LOCAL_RANK"])
    return int(environ.get("SLURM_PROCID", "0"))


_OF_PATHS = FileNotFoundError | FileExistsError | NotADirectoryError | PermissionError


def is_mistake(error: BaseException) -> bool:
    """Say whether the message alone tells the user the fix.

    True of errors of this package, of ``MisconfigurationException``, and of errors that Lightning, the system or a
    constructor raises outside the user's own code.
    """
    if isinstance(error, UsageError | ShardError | MisconfigurationException):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    refused = isinstance(error, ValueError | ModuleNotFoundError | _OF_PATHS)
    if not frames or not (refused or isinstance(error, RuntimeError | TypeError)):
        return False
    # jsonargparse builds all classes but optimizers, which Lightning's command line builds later.
    built = ("jsonargparse", "instantiate_class")
    constructed = any(package_of(frame) in built or frame.f_code.co_name in built for frame in frames)
    if refused and constructed and frames[-1].f_code.co_name in ("__init__", "__post_init__"):
        return True
    if refused and str(frames[-1].f_globals.get("__name__")).startswith(("torch.utils.data", "torch.optim")):
        return True
    if user_frame(error) is not None:
        return False
    # Errors that Lightning raises itself, not failures inside it.
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, _OF_PATHS) or (package_of(frames[-1]) == "lightning" and line.startswith("raise "))


def cause_of(error: Exception, failure: Exception | None) -> Exception:
    """Return a constructor's ``failure`` if jsonargparse reported it as an error of its own, else ``error``."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    reported = isinstance(error, ValueError) and package_of(last) == "jsonargparse"
    return error if failure is None or not reported else failure


def wait_for_children(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Return exit codes, None for children that still run."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [child.poll() for child in children]


def terminate_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    # Lightning handles SIGTERM while it trains, and a process inside a collective reacts to SIGKILL alone.
    if None in wait_for_children(children, 1.0):
        for child in children:
            child.kill()
    wait_for_children(children, 5.0)
