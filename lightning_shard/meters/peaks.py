"""Peak compute rates of devices, and the share of a peak that a run reaches."""

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense TFLOP/s of one torch device. An MI250X is two, one for each die.

    Vendors' tables often show twice these numbers, with a footnote that half of each matrix is zeros.
    """

    half: float  # bf16 and fp16 products, accumulated in fp32.
    single: float  # fp32 products in fp32.
    tf32: float | None = None  # fp32 products on tensor cores, rounded to TF32 (AMD: xf32). None: unsupported.
    fp8: float | None = None  # fp8 products, accumulated in fp32.
    bf16: bool = True  # Whether bf16 runs at ``half``. Devices before Ampere emulate it.
    memory: float | None = None  # TB/s of its memory. None: the same per FLOP as an H100.
    reached: float = 0.70  # Share of ``half`` that large products reach (`lightning_shard.planning.operators`).
    # Share of the large products' rate that fused attention reaches. FlashAttention-2 uses no instructions of Hopper or
    # later devices.
    attention: float = 0.7
    processors: int = 132  # Streaming multiprocessors, compute units.
    host: float = 64.0  # GB/s of its link to the host, in one direction.


@cache
def _table() -> list[tuple[str, Peaks]]:
    """Patterns of device names with their peaks, in the order of ``peaks.csv``."""
    lines = Path(__file__).with_name("peaks.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [(row.pop("name"), Peaks(**{key: json.loads(cell) for key, cell in row.items() if cell})) for row in rows]


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def find_peaks(device_name: str) -> Peaks | None:
    """The row for a device's name. None: the table lacks it, or it is a slice of a device (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    found = (peaks for pattern, peaks in _table() if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE))
    return next(found, None)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak FLOP/s of one device (``torch.cuda.get_device_name``) for products in ``dtype``. None: unknown.

    torch's setting decides whether fp32 products run on tensor cores.
    """
    peaks = find_peaks(device_name)
    if peaks is None:
        return None
    # torch.set_float32_matmul_precision sets this too. Its own getter fails if only this was set.
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    rates = {
        torch.float16: peaks.half,
        torch.bfloat16: peaks.half if peaks.bf16 else None,
        torch.float32: (tf32 and peaks.tf32) or peaks.single,
        **dict.fromkeys(_FP8, peaks.fp8),
    }
    # Rounded to the decimals of the table.
    return None if (rate := rates.get(dtype)) is None else round(rate * 1000) * 1e9


def mfu(flops: float, seconds: float, peak: float, *, devices: int = 1) -> float:
    """Model FLOPs utilisation, from 0 to 1: FLOPs (`count_flops`) of all devices / (time x devices x peak)."""
    return flops / (seconds * peak * devices)
