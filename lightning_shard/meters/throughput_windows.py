"""Measure windows of steps on each rank and combine them over ranks: batches, times and memory, as tables and lines.

`WaitClock` measures how long a rank's main thread waits for other ranks.
"""

import csv
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from lightning_shard.engines.memory_breakdown import tensors_in
from lightning_shard.meters.peaks import mfu
from lightning_shard.private_names import require
from lightning_shard.text import columns, show_seconds

require(dist, "_broadcast_coalesced")
require(Variable, "_execution_engine")

STANDS_OUT = 0.2  # A rank stands out if its lag is a larger share of a step.
IGNORED = -100  # The label that torch's cross entropy ignores.


def batch_size(
    batch: Any, *, tokens_key: str | int | None = None, mask_key: str | int | None = None
) -> tuple[int, int | None, Tensor | None]:
    """Count samples, tokens, and tokens without padding in one rank's batch.

    Tensors are searched in mappings and sequences, in their order. Samples are the size of the tokens' first dim, else
    of the first tensor with dims, else 0. Without tokens their count is None. Tokens without padding are a 0-d integer
    tensor on the batch's device, or None if padding is unknown.

    ``tokens_key`` is the entry with the tokens, by default ``input_ids``, else the first integer tensor of two or more
    dims, such as (batch, time). Padding is 0 or -100 in the entry ``mask_key``. By default it is 0 in an
    ``attention_mask`` of the tokens' shape, else -100 in ``labels`` or in another integer tensor of that shape.
    """
    tensors = list(tensors_in(batch))
    named = _entry(batch, "input_ids" if tokens_key is None else tokens_key)
    tokens = named if named is not None else next((tensor for tensor in tensors if _is_tokens(tensor)), None)
    if tokens is None:
        return next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0), None, None
    count = tokens.shape[0], tokens.numel()
    mask = _entry(batch, mask_key if mask_key is not None else "attention_mask")
    if mask is not None and mask.shape == tokens.shape:
        return *count, mask.sum() if mask.dtype == torch.bool else ((mask != 0) & (mask != IGNORED)).sum()
    labels = _entry(batch, "labels")
    if labels is None or labels.shape != tokens.shape:
        others = (t for t in tensors if t is not tokens and t.shape == tokens.shape and _is_tokens(t))
        labels = next(others, None)
    return *count, None if labels is None else (labels != IGNORED).sum()


def _entry(batch: Any, key: str | int | None) -> Tensor | None:
    """The tensor under a key of a mapping or an index of a sequence, if any."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get(key)
    elif isinstance(batch, Sequence) and isinstance(key, int) and key < len(batch):
        found = batch[key]
    return found if isinstance(found, Tensor) else None


def _is_tokens(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    # Bytes with more dims are images.
    return tensor.ndim == 2 if tensor.dtype == torch.uint8 else tensor.ndim > 1


@dataclass
class RankWindow:
    """One rank's window, in numbers that ranks exchange in one collective."""

    seconds: float = 0.0  # Training time from batch to batch, without validation and checkpoints.
    samples: float = 0.0
    tokens: float = 0.0  # Including padding.
    real_tokens: float = 0.0  # Without padding. All tokens, if padding is unknown.
    flops: float = 0.0  # Model FLOPs. 0: unknown.
    data_seconds: float = 0.0  # Part of ``seconds`` in which the rank waited for the dataloader.
    peer_seconds: float = 0.0  # Part of ``seconds`` in which the rank waited for other ranks.
    checkpoint_seconds: float = 0.0  # Time blocked in saving checkpoints, not in ``seconds``.
    allocated: float = 0.0  # Peak bytes of tensors since the fit began, on a CPU the process's peak resident set.
    reserved: float = 0.0  # Peak bytes that torch's allocator reserved on the device, 0 on a CPU.

    @property
    def own_seconds(self) -> float:
        """Time in which the rank computed or waited for data."""
        return max(0.0, self.seconds - self.peer_seconds)


@dataclass(frozen=True, kw_only=True)
class Window:
    """All ranks' window of ``steps`` optimizer steps, up to ``step``. The fields are the CSV's columns."""

    step: int
    steps: int
    devices: int
    step_seconds: float  # Of the slowest rank.
    samples_per_second: float  # Over all ranks.
    samples_per_second_per_device: float
    tokens_per_second: float | None  # Over all ranks, without padding. None: the batches have no tokens.
    tokens_per_second_per_device: float | None
    padding_share: float | None  # Of all tokens.
    mfu: (
        float | None
    )  # Model FLOPs utilisation (`lightning_shard.meters.peaks.mfu`). Padding is computed, so it counts.
    data_share: float  # Share of the time in which ranks waited for data.
    checkpoint_seconds: float  # Of the rank that saving blocked longest.
    grad_norm: float | None  # The value that the run logged last.
    allocated: int  # Of the rank with the most, see `RankWindow`.
    reserved: int
    largest_rank: int  # The rank with the most allocated bytes.
    slowest_rank: int  # The rank with the most own time, for compute and data.
    slowest_node: str | None = None  # The host of ``slowest_rank`` if it stands out.
    compute_seconds: float  # Of the slowest rank per step, without waiting for other ranks.
    data_seconds: float  # Of the slowest rank per step.
    lag_seconds: float  # The slowest rank's own time per step minus the median of the other ranks'. 0 for one rank.

    @property
    def stands_out(self) -> bool:
        """Whether a step would be a fifth shorter if the slowest rank took the median time of the others."""
        return self.lag_seconds > STANDS_OUT * self.step_seconds


def combine(
    ranks: Sequence[RankWindow], *, step: int, steps: int, peak: float | None, grad_norm: float | None = None
) -> Window | None:
    """Combine the windows of all ranks, in rank order. None: no time passed. ``step`` counts the run's optimizer steps,
    ``steps`` the window's. ``peak`` is FLOP/s of one device.
    """
    seconds = max(rank.seconds for rank in ranks)
    if seconds <= 0:
        return None
    names = ("samples", "tokens", "real_tokens", "flops")
    samples, tokens, real, flops = (sum(getattr(rank, name) for rank in ranks) for name in names)
    largest = max(range(len(ranks)), key=lambda index: ranks[index].allocated)
    slowest = max(range(len(ranks)), key=lambda index: ranks[index].own_seconds)
    own = ranks[slowest].own_seconds
    others = [rank.own_seconds for index, rank in enumerate(ranks) if index != slowest] or [own]
    return Window(
        step=step,
        steps=steps,
        devices=len(ranks),
        step_seconds=seconds / steps,
        samples_per_second=samples / seconds,
        samples_per_second_per_device=samples / seconds / len(ranks),
        tokens_per_second=real / seconds if tokens else None,
        tokens_per_second_per_device=real / seconds / len(ranks) if tokens else None,
        padding_share=1 - real / tokens if tokens else None,
        mfu=mfu(flops, seconds, peak, devices=len(ranks)) if peak is not None and flops else None,
        data_share=sum(rank.data_seconds for rank in ranks) / (seconds * len(ranks)),
        checkpoint_seconds=max(rank.checkpoint_seconds for rank in ranks),
        allocated=int(ranks[largest].allocated),
        reserved=int(max(rank.reserved for rank in ranks)),
        largest_rank=largest,
        slowest_rank=slowest,
        compute_seconds=(own - ranks[slowest].data_seconds) / steps,
        data_seconds=ranks[slowest].data_seconds / steps,
        lag_seconds=(own - statistics.median(others)) / steps,
        grad_norm=grad_norm,
    )


def gather_rows(numbers: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> list[list[Any]]:
    """Gather a row of numbers from every rank. All ranks call it and wait. Without a process group it has one row."""
    own = torch.tensor(numbers, dtype=dtype, device=device)
    if not (dist.is_available() and dist.is_initialized()):
        return [own.tolist()]
    rows = own.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather(list(rows), own)
    return rows.tolist()


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """Peak bytes allocated and reserved on ``device``. On a CPU, the process's peak resident set and 0."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    # In KiB on Linux, in bytes on macOS (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024), 0


def write_csv(windows: Iterable[Window], path: Path) -> None:
    """Write a line for each window. Unknown values are empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[f.name for f in fields(Window)], *map(astuple, windows)])


def summary_table(windows: Sequence[Window], *, blocked: float, on_cpu: bool) -> str:
    """Medians and deciles over windows, without the first of several. ``blocked``: seconds that rank 0 spent in saves.
    ``on_cpu``: memory is the process's.
    """
    counted = windows[1:] or windows
    rows: list[tuple[str, ...]] = [("", "median", "10 %", "90 %")]
    for label, name, scale, form in (
        ("step time", "step_seconds", 1e3, "{:.1f} ms"),
        ("tokens/s", "tokens_per_second", 1, "{:,.0f}"),
        ("tokens/s_per_device", "tokens_per_second_per_device", 1, "{:,.0f}"),
        ("samples/s", "samples_per_second", 1, "{:,.1f}"),
        ("samples/s_per_device", "samples_per_second_per_device", 1, "{:,.1f}"),
        ("MFU", "mfu", 100, "{:.1f} %"),
        ("padding", "padding_share", 100, "{:.1f} %"),
        ("waiting for data", "data_share", 100, "{:.1f} %"),
        ("gradient norm", "grad_norm", 1, "{:.3g}"),
    ):
        values = [value * scale for window in counted if (value := getattr(window, name)) is not None]
        if values:
            deciles = statistics.quantiles(values if len(values) > 1 else 2 * values, n=10, method="inclusive")
            rows.append((label, *map(form.format, (statistics.median(values), deciles[0], deciles[-1]))))
    last = windows[-1]
    steps = sum(window.steps for window in counted)
    memory = "resident" if on_cpu else f"allocated, {size_text(last.reserved)} reserved"
    lines = (
        f"Throughput: {steps} optimizer steps in {len(counted)} windows, {last.devices} devices",
        columns(rows, numbers=True),
        f"time blocked in checkpoints: {blocked:.1f} s",
        f"peak memory: {size_text(last.allocated)} {memory}, most on rank {last.largest_rank}",
    )
    out = [window for window in counted if window.stands_out]
    worst = f"slowest in {len(out)} of {len(counted)} windows: " if out else ""
    return "\n".join([*lines, *(worst + slowest_line(w) for w in sorted(out, key=lambda w: -w.lag_seconds)[:1])])


def slowest_line(window: Window) -> str:
    return (
        f"rank {window.slowest_rank} on {window.slowest_node}, {show_seconds(window.lag_seconds)} a step behind the "
        f"median of the others (computes {show_seconds(window.compute_seconds)}, waits for data "
        f"{show_seconds(window.data_seconds)}, of steps of {show_seconds(window.step_seconds)})"
    )


def window_line(window: Window, loss: float | None) -> str:
    rate = f"{window.samples_per_second:,.1f} samples/s,"
    parts = [
        f"step {window.step}:" + ("" if loss is None else f" loss {loss:.4g},"),
        "" if window.grad_norm is None else f"grad_norm {window.grad_norm:.3g},",
        rate if window.tokens_per_second is None else f"{window.tokens_per_second:,.0f} tokens/s,",
        "" if window.mfu is None else f"MFU {window.mfu:.1%},",
        f"{size_text(window.allocated)} on rank {window.largest_rank}",
        f"; slowest: {slowest_line(window)}" if window.stands_out else "",
    ]
    return " ".join(part for part in parts if part).replace(" ;", ";")


def size_text(size: float) -> str:
    """Bytes in the largest binary unit, up to GiB."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((f"{size / factor:.2f} {unit}" for unit, factor in units if size >= factor), f"{size:.0f} B")


# Every collective that Python calls ends in Work.wait, except DDP's broadcast of buffers.
_WAITS: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (dist, "_broadcast_coalesced"))


class WaitClock:
    """Sums up the ``seconds`` in which the thread that called `start_timing` waits in collectives. With a GPU's backend
    these are 0, because `torch.distributed.Work.wait` does not block the host.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: list[tuple[Any, str, Any]] = []
        self._tail: tuple[float, float] | None = None

    def start_timing(self) -> None:
        self._thread = threading.get_ident()
        # Replaced for the whole process, but counted in this thread alone.
        self._before = [(owner, name, getattr(owner, name)) for owner, name in _WAITS]
        for owner, name, wait in self._before:
            setattr(owner, name, self._timed(wait))

    @contextmanager
    def counted(self) -> Generator[None, None, None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            with self.counted():
                return wait(*args, **kwargs)

        return timed

    def mark_backward_end(self, loss: Tensor) -> None:
        """Record when this rank's own backward pass ends. DDP then waits for its buckets in C++."""

        def over() -> None:
            self._tail = time.perf_counter(), self.seconds

        if loss.requires_grad:
            # Runs before DDP's own callback, which is queued later.
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(over))

    def count_backward_tail(self) -> None:
        """Count the time since the rank's own backward pass ended."""
        if self._tail is not None:
            start, seconds = self._tail
            self.seconds = seconds + time.perf_counter() - start
        self._tail = None

    def stop_timing(self) -> None:
        while self._before:
            setattr(*self._before.pop())
