"""Traces of a rank: the user's line that raised an error, its last collectives and stacks, and the rank to blame."""

import contextlib
import faulthandler
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import distributed as dist
from torch._C import _distributed_c10d

# Packages whose frames are not the user's code. torch comes first, see `_user_call`.
_PACKAGES = ("torch", "lightning", "pytorch_lightning", "deepspeed", "torchmetrics", "lightning_shard")
_LIBRARIES = sys.stdlib_module_names - {"__main__"}
_LIBRARIES |= {*_PACKAGES, "fsspec", "jsonargparse", "lightning_utilities", "transformers"}


def user_frame(error: BaseException) -> str | None:
    """``file:line, in function`` of the innermost frame in the user's own code, of a worker process too, or None."""
    in_worker = [{"filename": f, "line": n, "name": name} for f, n, name in _FRAME.findall(_worker_trace(error)[1])]
    if found := _innermost(in_worker[::-1], _library_folders()):
        return f"{found['filename']}:{found['line']}, in {found['name']}"
    walked = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__) if package_of(f) not in _LIBRARIES]
    # An installed package may be the user's, but is another library more often.
    walked.sort(key=lambda place: "site-packages" not in place[0].co_filename)
    return f"{walked[-1][0].co_filename}:{walked[-1][1]}, in {walked[-1][0].co_name}" if walked else None


def keep_user_frames(error: BaseException) -> None:
    """Cut all frames but the user's from the traceback of ``error``, which this package raises."""
    kept, walked = None, []
    trace = error.__traceback__
    while trace is not None:
        walked.append(trace)
        trace = trace.tb_next
    for each in reversed(walked):
        if package_of(each.tb_frame) not in _LIBRARIES:
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.with_traceback(kept)
    error.__suppress_context__ = True


_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?:    .*\n)*', re.MULTILINE)


def _worker_trace(error: BaseException) -> tuple[str, str]:
    """Name and traceback of the DataLoader's worker process that raised ``error``, or two empty strings."""
    caught, marked, trace = str(error).partition(".\nOriginal Traceback (most recent call last):\n")
    return (caught.partition(" in ")[2], trace) if marked else ("", "")


def words_of(error: BaseException) -> str:
    """The message of ``error``, without the frames that torch adds to one from a DataLoader's worker process."""
    worker, trace = _worker_trace(error)
    if not worker:
        return str(error)
    kind, _, words = _FRAME.split(trace)[-1].strip().partition(": ")
    return f"{words or kind} (in {worker})"


def package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


PREFIX = "collectives_"
"""File names' part before the rank. With NCCL ``torchfrtrace --prefix collectives_ FOLDER`` compares the files."""


def dump_stacks() -> None:
    """Write the stacks of all threads to the process' own stderr, even if ``sys.stderr`` was replaced."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def recorded_collectives() -> list[bytes]:
    """This rank's last collectives from torch's Flight Recorders, pickled, NCCL's first if it is used. The
    environment's ``TORCH_FR_BUFFER_SIZE`` sets their number.
    """
    # Private. A torch that lacks one writes nothing of it.
    names = ["_dump_fr_trace"]
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        names.insert(0, "_dump_nccl_trace")
    recorded = []
    for name in names:
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            recorded.append(bytes(getattr(_distributed_c10d, name)()))
    return recorded


def _entries(recorded: Sequence[bytes]) -> list[dict[str, Any]]:
    # The records were made by this process.
    return [entry for record in recorded for entry in pickle.loads(record).get("entries", [])]


def collective_position(recorded: Sequence[bytes]) -> dict[str, Any]:
    """Fields of `Report` from a rank's record, point-to-point operations left out. ``waits``: the first collective that
    has not ended (group, number in the group, operation and caller), or None. ``last``: the last number by group.
    """
    entries = [entry for entry in _entries(recorded) if not entry["is_p2p"]]
    waits = next((entry for entry in entries if not entry["retired"]), None)
    return {
        "waits": None if waits is None else _called(waits),
        "last": {entry["process_group"][0]: entry["collective_seq_id"] for entry in entries},
    }


def _called(entry: Mapping[str, Any]) -> tuple[str, int, str, str]:
    operation = f"{entry['profiling_name']} {entry['input_sizes']}"
    return entry["process_group"][0], entry["collective_seq_id"], operation, _user_call(entry.get("frames", []))


def main_thread_line() -> str:
    walked = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    return _user_call([{"name": f.f_code.co_name, "filename": f.f_code.co_filename, "line": n} for f, n in walked])


def _user_call(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame in the user's code, or else outside of torch, in words that follow others."""
    folders = _library_folders()
    frame = _innermost(frames, folders) or _innermost(frames, folders[:1])
    return f", from {frame['name']} at {frame['filename']}:{frame['line']}" if frame else ""


def _library_folders() -> list[Path]:
    """Folders of libraries' code, torch's first."""
    modules = [sys.modules[name].__file__ for name in _PACKAGES if name in sys.modules]
    return [*(Path(file).parent for file in modules if file is not None), Path(os.__file__).parent]


def _innermost(frames: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> Mapping[str, Any] | None:
    """The first frame of ``frames``, innermost first, whose file lies outside of ``folders``."""
    paths = ((frame, Path(frame["filename"])) for frame in frames)
    return next((frame for frame, path in paths if path.is_absolute() and not {*folders} & {*path.parents}), None)


def write_traces(folder: Path, rank: int) -> Path:
    """Write stacks into ``folder``/``rank_<rank>.txt``, which is returned, and torch's record next to it. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = recorded_collectives()[:1]
    text = folder / f"rank_{rank}.txt"
    with text.open("w") as file:
        for entry in _entries(recorded)[-20:]:
            group, number, operation, caller = _called(entry)
            print(f"{number} of {group}: {operation}, {entry['state']}{caller}", file=file)
        print(file=file, flush=True)
        faulthandler.dump_traceback(file=file, all_threads=True)
    if recorded:
        (folder / f"{PREFIX}{rank}").write_bytes(recorded[0])
    return text


_BATCH = ("data", "forward", "backward", "step", "validation")
"""Phases in which a rank has no good reason to keep the others waiting. A save or a callback may have one."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank's own account of its standstill."""

    name: str  # Of the rank.
    seconds: float  # Since it moved.
    phase: str  # data, forward, backward, step, save or validation, or the name of a hook.
    step: int  # Optimizer steps so far.
    line: str  # Of its main thread, in words that follow others.
    waits: Sequence[Any] | None  # See `collective_position`, as for the next one.
    last: Mapping[str, int]

    def describe_place(self) -> str:
        place = f"in {self.phase} after step {self.step}"
        if self.waits is None:
            return place + self.line
        group, number, operation, caller = self.waits
        return f"{place}, where it waits in {operation}, number {number} of group {group}{caller or self.line}"


class Progress:
    """The main thread's actions, which it reports at their beginning and end. Another thread reads them."""

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        """``step`` gives the optimizer steps so far, in any thread."""
        self._step = step
        self._actions: list[str] = []
        self._moved = time.monotonic()

    def begin_action(self, action: str) -> None:
        self._actions.append(action)
        self._moved = time.monotonic()

    def end_action(self, action: str) -> None:
        """End ``action`` and those inside it that an error left."""
        while self._actions and self._actions.pop() != action:
            pass
        self._moved = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since an action began or ended, 0 before the first."""
        return time.monotonic() - self._moved if self._actions else 0.0

    def report(self, name: str, **place: Any) -> Report:
        """The report of this rank, with further fields of `Report` in ``place``."""
        action = next(iter(self._actions[-1:]), "")
        phase = next((phase for ending, phase in _PHASES.items() if action.endswith(ending)), action)
        return Report(name=name, seconds=self.seconds, phase=phase, step=self._step(), **place)


_PHASES = {
    "_next": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "step",
    "save_checkpoint": "save",
    "validation_step": "validation",
    "run_training_epoch": "the epoch's loop",
}
"""Phase by the end of the Trainer's name for an action."""


def ranks_to_blame(reports: Mapping[int, Report]) -> list[int]:
    """The ranks that the others wait for, if any. First those in no collective while others are in one. Else those that
    have not called a collective in which others wait. If that is true of all or of none, those in another collective
    than most.
    """
    waiting = {rank: report.waits for rank, report in reports.items() if report.waits is not None}
    if not waiting:
        return []
    if len(waiting) < len(reports):
        return sorted(set(reports) - set(waiting))
    first: dict[str, int] = {}  # the highest number that a rank waits in, by group
    for group, number, *_ in waiting.values():
        first[group] = max(number, first.get(group, number))
    behind = [rank for rank, report in reports.items() if any(report.last.get(g, n) < n for g, n in first.items())]
    if 0 < len(behind) < len(reports):
        return sorted(behind)
    places = {rank: tuple(waits[:3]) for rank, waits in waiting.items()}
    (most, count), *others = Counter(places.values()).most_common()
    if not others:
        return []
    if others[-1][1] == count:  # as many, of two ranks as a rule
        most = places[max(places)]
    return sorted(rank for rank in places if places[rank] != most)


def describe_hang(reports: Mapping[int, Report], culprits: Sequence[int]) -> str:
    first = reports[culprits[0]]
    more = f" (as {len(culprits) - 1} others)" if len(culprits) > 1 else ""
    others = [report for rank, report in reports.items() if rank not in culprits]  # never empty, see `ranks_to_blame`
    # One that waits for this rank, rather than for one that itself waits.
    other = min(others, key=lambda report: report.waits is None or report.waits[0] not in first.last)
    return (
        f"{first.name} has not moved for {first.seconds:.0f} s{more}: it is {first.describe_place()}. {other.name} is "
        f"{other.describe_place()}"
    )


def is_certain(reports: Mapping[int, Report], culprits: Sequence[int]) -> bool:
    """Whether the hang can't end by itself, or should have ended long ago."""
    return all(reports[rank].waits is not None or reports[rank].phase in _BATCH for rank in culprits)
