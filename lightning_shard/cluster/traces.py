"""What can still be written of a rank that is stuck in a collective: its last collectives, and its stacks."""

import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch._C import _distributed_c10d

PREFIX = "collectives_"
"""Of the files' names, before the rank; with NCCL ``torchfrtrace --prefix collectives_ FOLDER`` compares them."""


def dump_stacks() -> None:
    """Write the stacks of all threads to the process' stderr, whatever Python's may have been replaced by."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def recorded_collectives(**options: bool) -> list[bytes]:
    """This rank's last collectives, as torch's Flight Recorders have them, pickled: NCCL's first, where it is used.

    Each has its name, sizes, dtypes and state; ``options`` are torch's, of what to leave out. The environment variable
    ``TORCH_FR_BUFFER_SIZE`` says how many are kept; with 0 there are none.
    """
    # Private, and made for CPU backends in torch 2.11 or so; what another torch does not have is not written.
    names = ["_dump_fr_trace"]
    if dist.is_initialized() and "nccl" in str(dist.get_backend()):
        names.insert(0, "_dump_nccl_trace")
    recorded = []
    for name in names:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                recorded.append(bytes(dump(**options)))
    return recorded


def _entries(recorded: Sequence[bytes]) -> list[dict[str, Any]]:
    # The records were made by this process.
    return [entry for record in recorded for entry in pickle.loads(record).get("entries", [])]


def overdue(part: float) -> bool:
    """Whether a collective of this process has waited for more than ``part`` of its timeout."""
    now = time.time_ns()
    return any(
        not entry["retired"] and now - entry["time_created_ns"] > part * entry["timeout_ms"] * 1_000_000
        for entry in _entries(recorded_collectives(includeStackTraces=False, onlyActive=True))
    )


def position(recorded: Sequence[bytes], count: int = 8) -> dict[str, Any]:
    """Where a rank is among the collectives, as plain values.

    ``waits``: the first that has not ended, None for none; ``recent``: the last ``count``; both as group, number in it,
    what it is and who called it. ``last``: the last number by group. What two ranks send each other is left out.
    """
    entries = [entry for entry in _entries(recorded) if not entry["is_p2p"]]
    waits = next((entry for entry in entries if not entry["retired"]), None)
    return {
        "waits": None if waits is None else _called(waits),
        "recent": [_called(entry) for entry in entries[-count:]],
        "last": {entry["process_group"][0]: entry["collective_seq_id"] for entry in entries},
    }


def _called(entry: Mapping[str, Any]) -> tuple[str, int, str, str]:
    what = f"{entry['profiling_name']} {entry['input_sizes']}"
    return entry["process_group"][0], entry["collective_seq_id"], what, _caller(entry.get("frames", []))


def main_thread_line() -> str:
    frame, frames = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        frames.append({"name": frame.f_code.co_name, "filename": frame.f_code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return _caller(frames)


def record_into(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Have torch write its own record, should NCCL end this process, beside those of `write`."""
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / PREFIX))


def last_collectives(recorded: bytes) -> list[str]:
    """A line for each of the last 20 collectives of a record: number, name, sizes, state, and who called it."""
    lines = []
    for entry in _entries([recorded])[-20:]:
        group = entry["process_group"][1] or entry["process_group"][0]
        lines.append(
            f"{entry['collective_seq_id']} of {group}: {entry['profiling_name']} {entry['input_sizes']} "
            f"{entry['input_dtypes']}, {entry['state']}{_caller(entry.get('frames', []))}"
        )
    return lines


_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "deepspeed", "torchmetrics", "lightning_shard")


def _caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame in code of the user's, or else outside of torch."""
    modules = [sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules]
    own = [Path(file).parent for file in modules if file is not None]
    for folders in ([*own, Path(os.__file__).parent], own[:1]):
        for frame in frames:
            path = Path(frame["filename"])
            if path.is_absolute() and not any(folder in path.parents for folder in folders):
                return f", from {frame['name']} at {frame['filename']}:{frame['line']}"
    return ""


def write(folder: Path, rank: int) -> list[Path]:
    """Write the last collectives and the stacks of this process into ``folder``, and return the files.

    ``rank_<rank>.txt`` is for people, ``collectives_<rank>`` is torch's record as it is. What can't be written is left
    out: there is another failure to tell of.
    """
    written = []
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        collectives = recorded_collectives()
        text = folder / f"rank_{rank}.txt"
        with text.open("w") as file:
            if collectives:
                lines = last_collectives(collectives[0])
                print("The last collectives:", *lines, "", sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
        written.append(text)
        if collectives:
            written.append(folder / f"{PREFIX}{rank}")
            written[-1].write_bytes(collectives[0])
    return written
