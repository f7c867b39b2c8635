"""How a command ends after an error: one rank says what a user's mistake is, a bug is raised, no child stays."""

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
# How long a rank other than 0 keeps a mistake to itself: rank 0 has most often made the same one, says it, and
# ends the others.
_SILENCE_SECONDS = 2.0
# How long rank 0 waits for the children's own last words before it ends them.
_LAST_WORDS_SECONDS = 4.0


def end(error: Exception, trainer: Any, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """End the children; after a mistake print it on one rank, by ``environ``, and exit with code 2. Returns when it is
    to be raised. ``trainer`` is None where none was built; ``--traceback`` among the arguments asks for frames.
    """
    children = processes.take_children(trainer)
    if not is_mistake(error):
        # A lost child breaks this rank's collectives: then what the child said is the cause.
        if MISTAKE_EXIT_CODE in wait(children, _LAST_WORDS_SECONDS):
            raise SystemExit(MISTAKE_EXIT_CODE) from error
        terminate(children)
        return
    if not getattr(error, "said", False):  # by another rank, whose failure this is the outcome of
        if rank := global_rank(environ):
            time.sleep(_SILENCE_SECONDS)
        sys.stdout.flush()
        # The user's line; of a module that can't be imported, of which the parser tells the words alone, that line.
        inner = (one for one in chain(error) if one is not error and isinstance(one, ImportError))
        where = user_frame(error) or next(map(user_frame, inner), None)
        raised, who = f"\n(raised in {where})" if where else "", f"[rank {rank}] " if rank else ""
        print(f"{who}error: {words_of(error)}{raised}", file=sys.stderr, flush=True)
    terminate(children)
    if "--traceback" in arguments:
        traceback.print_exception(error)
    raise SystemExit(MISTAKE_EXIT_CODE) from error


def global_rank(environ: Mapping[str, str]) -> int:
    """Rank by the launcher, else 0: torchrun's ``RANK``, then ``LOCAL_RANK`` of Lightning's children, which may stand
    inside a SLURM step of one task, then SLURM's.
    """
    if "RANK" in environ:
        return int(environ["RANK"])
    if "LOCAL_RANK" in environ:
        local_world = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        return int(environ.get("NODE_RANK", "0")) * local_world + int(environ["LOCAL_RANK"])
    return int(environ.get("SLURM_PROCID", "0"))


_OF_PATHS = FileNotFoundError | FileExistsError | NotADirectoryError | PermissionError


def is_mistake(error: BaseException) -> bool:
    """Whether the message alone says what to change: an error of this package, ``MisconfigurationException``, or what
    Lightning, the system or a constructor refuses without the user's code having been entered.
    """
    if isinstance(error, UsageError | ShardError | MisconfigurationException):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    refused = isinstance(error, ValueError | ModuleNotFoundError | _OF_PATHS)
    if not frames or not (refused or isinstance(error, RuntimeError | TypeError)):
        return False
    # By jsonargparse, or by Lightning's command line once the model is there (optimizers).
    built = ("jsonargparse", "instantiate_class")
    constructed = any(package_of(frame) in built or frame.f_code.co_name in built for frame in frames)
    if refused and constructed and frames[-1].f_code.co_name in ("__init__", "__post_init__"):
        return True
    if refused and str(frames[-1].f_globals.get("__name__")).startswith(("torch.utils.data", "torch.optim")):
        return True
    if user_frame(error) is not None:
        return False
    # What Lightning itself says, not what fails in it.
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return isinstance(error, _OF_PATHS) or (package_of(frames[-1]) == "lightning" and line.startswith("raise "))


def cause_of(error: Exception, failure: Exception | None) -> Exception:
    """What made the command fail: ``failure``, raised by a constructor, where jsonargparse reported it as its own."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    reported = isinstance(error, ValueError) and package_of(last) == "jsonargparse"
    return error if failure is None or not reported else failure


def wait(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit codes, None for those that have not ended in this time."""
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [child.poll() for child in children]


def terminate(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    # Lightning handles SIGTERM while it trains, and a process inside a collective sees no signal but SIGKILL.
    if None in wait(children, 1.0):
        for child in children:
            child.kill()
    wait(children, 5.0)
