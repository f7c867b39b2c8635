"""What can still be written of a rank that is stuck in a collective: its last collectives, and its stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d

PREFIX = "collectives_"
"""Of the files' names, before the rank; with NCCL ``torchfrtrace --prefix collectives_ FOLDER`` compares them."""


def dump_stacks() -> None:
    """Write the stacks of all threads to the process' stderr, whatever Python's may have been replaced by."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def recorded_collectives(**options: bool) -> bytes | None:
    """This rank's last collectives, as torch's Flight Recorder has them, pickled; None where it has none.

    Each has its name, sizes, dtypes and state; ``options`` are torch's, of what to leave out. The environment variable
    ``TORCH_FR_BUFFER_SIZE`` says how many are kept; with 0 there are none.
    """
    # Private, and made for CPU backends in torch 2.11 or so; what another torch does not have is not written.
    names = ["_dump_fr_trace"]
    if dist.is_initialized() and "nccl" in str(dist.get_backend()):
        names.insert(0, "_dump_nccl_trace")
    for name in names:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                return bytes(dump(**options))
    return None


def overdue(part: float) -> bool:
    """Whether a collective of this process has waited for more than ``part`` of its timeout."""
    recorded = recorded_collectives(includeStackTraces=False, onlyActive=True)
    # The record was made by this process.
    entries = [] if recorded is None else pickle.loads(recorded).get("entries", [])
    now = time.time_ns()
    return any(
        not entry["retired"] and now - entry["time_created_ns"] > part * entry["timeout_ms"] * 1_000_000
        for entry in entries
    )


def record_into(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Have torch write its own record, should NCCL end this process, beside those of `write`."""
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / PREFIX))


def last_collectives(recorded: bytes, count: int = 20) -> list[str]:
    """A line for each of the last ``count`` collectives of a record: number, name, sizes, state, and who called it."""
    lines = []
    # The record was made by this process.
    for entry in pickle.loads(recorded)["entries"][-count:]:
        group = entry["process_group"][1] or entry["process_group"][0]
        lines.append(
            f"{entry['collective_seq_id']} of {group}: {entry['profiling_name']} {entry['input_sizes']} "
            f"{entry['input_dtypes']}, {entry['state']}{_caller(entry.get('frames', []))}"
        )
    return lines


def _caller(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside of torch."""
    own = Path(torch.__file__).parent
    for frame in frames:
        if own not in Path(frame["filename"]).parents:
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
            if collectives is not None:
                print("The last collectives:", *last_collectives(collectives), "", sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
        written.append(text)
        if collectives is not None:
            written.append(folder / f"{PREFIX}{rank}")
            written[-1].write_bytes(collectives)
    return written
