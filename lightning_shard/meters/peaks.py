"""What devices can compute at best, and which part of it a run does."""

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense TFLOP/s of one device as torch sees it (of an MI250X: one of its two dies).

    Vendors' tables often show the double of these with a footnote: that is for matrices of which half is zeros.
    """

    half: float  # bf16 and fp16 products, accumulated in fp32.
    single: float  # fp32 products in fp32.
    tf32: float | None = None  # fp32 products on the tensor cores, rounded to TF32 (AMD: xf32); None: there are none.
    fp8: float | None = None  # fp8 products, accumulated in fp32.
    bf16: bool = True  # Whether bf16 runs at ``half``; devices before Ampere emulate it.
    memory: float | None = None  # TB/s of its memory; None: as much for each FLOP as an H100 has.
    reached: float = 0.70  # Of ``half``, what large products reach (`lightning_shard.planning.operators`).
    # Of that, what fused attention reaches: FlashAttention-2 has none of the instructions of Hopper and later.
    attention: float = 0.7
    processors: int = 132  # Streaming multiprocessors, compute units.
    host: float = 64.0  # GB/s of its link to the host, in one direction.


@cache
def _table() -> list[tuple[str, Peaks]]:
    """Patterns of devices' names and what they mean, in the order of ``peaks.csv``."""
    lines = Path(__file__).with_name("peaks.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [(row.pop("name"), Peaks(**{key: json.loads(cell) for key, cell in row.items() if cell})) for row in rows]


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def find_peaks(device_name: str) -> Peaks | None:
    """The row of a device's name; None: it is not in the table, or is a slice of a device (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    found = (peaks for pattern, peaks in _table() if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE))
    return next(found, None)


def peak_flops(device_name: str, dtype: torch.dtype, *, tf32: bool | None = None) -> float | None:
    """Dense peak FLOP/s of one device (``torch.cuda.get_device_name``) for products in ``dtype``; None: not known.

    ``tf32``: whether fp32 products may run on tensor cores; default: as torch is set
    (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul.fp32_precision``).
    """
    peaks = find_peaks(device_name)
    if peaks is None:
        return None
    if tf32 is None:
        # Set by torch.set_float32_matmul_precision too, whose own getter fails where only this was set.
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    rates = {
        torch.float16: peaks.half,
        torch.bfloat16: peaks.half if peaks.bf16 else None,
        torch.float32: (tf32 and peaks.tf32) or peaks.single,
        **dict.fromkeys(_FP8, peaks.fp8),
    }
    # In decimals of what the table shows.
    return None if (rate := rates.get(dtype)) is None else round(rate * 1000) * 1e9


def mfu(flops: float, seconds: float, peak: float, *, devices: int = 1) -> float:
    """Model FLOPs utilisation, from 0 to 1: FLOPs (`count_flops`) of all devices by what they could do in that time."""
    return flops / (seconds * peak * devices)
