"""What devices can compute at best, and which part of it a run does."""

import re
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense TFLOP/s of one device as torch sees it (of an MI250X: one of its two dies).

    Vendors' tables often show the double of these with a footnote: that is for matrices of which half is zeros.
    """

    half: float  # bf16 and fp16 products, accumulated in fp32.
    tf32: float | None  # fp32 products on the tensor cores, rounded to TF32 (AMD: xf32); None: there are none.
    single: float  # fp32 products in fp32.
    fp8: float | None = None  # fp8 products, accumulated in fp32.
    bf16: bool = True  # Whether bf16 runs at ``half``; devices before Ampere emulate it.
    memory: float | None = None  # TB/s of its memory; None: as much for each FLOP as an H100 has.
    reached: float = 0.70  # Of ``half``, what large products reach (`lightning_shard.planning.operators`).
    attention: float = 0.7  # Of that, what fused attention reaches.
    processors: int = 132  # Streaming multiprocessors, compute units.
    host: float = 64.0  # GB/s of its link to the host, in one direction.


_Hopper = partial(Peaks, attention=0.47)  # And later: FlashAttention-2 has none of their own instructions.
_MI300 = partial(Peaks, memory=5.3, reached=0.48)

# The first pattern that is found in a device's name decides; patterns are of whole words, special before general.
# Names are those of torch.cuda.get_device_name: "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB".
_TABLE: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA Blackwell architecture technical brief, tables of GB200, GB300 and HGX systems; HGX: a system's eighth.
    (r"GB[23]00", _Hopper(half=2500, tf32=1250, single=80, fp8=5000, memory=8, processors=148, host=450)),
    (r"B[23]00", _Hopper(half=2250, tf32=1125, single=75, fp8=4500, memory=8, processors=148)),
    (r"B100", _Hopper(half=1750, tf32=875, single=60, fp8=3500, memory=8, processors=148)),
    # NVIDIA GH200 Grace Hopper superchip datasheet.
    (r"GH200", _Hopper(half=990, tf32=494, single=67, fp8=1979, memory=4, host=450)),
    # NVIDIA H200 datasheet: SXM is as H100 SXM, NVL as H100 NVL. It lists rates with sparsity; these are their halves.
    (r"H200 NVL", _Hopper(half=835.5, tf32=417.5, single=60, fp8=1670.5, memory=4.8)),
    (r"H200", _Hopper(half=989.4, tf32=494.7, single=66.9, fp8=1978.9, memory=4.8)),
    # NVIDIA H100 Tensor Core GPU architecture whitepaper, table 2 (SXM5, PCIe); datasheet (NVL, halves).
    (r"H[18]00 NVL", _Hopper(half=835.5, tf32=417.5, single=60, fp8=1670.5, memory=3.9)),
    # "80GB HBM2e" is the PCIe card too.
    (r"H[18]00 (?:PCIe|80GB HBM2e)", _Hopper(half=756, tf32=378, single=51.2, fp8=1513, memory=2, processors=114)),
    (r"H[18]00", _Hopper(half=989.4, tf32=494.7, single=66.9, fp8=1978.9, memory=3.35)),
    # NVIDIA H20 datasheet.
    (r"H20", Peaks(half=148, tf32=74, single=44, fp8=296, memory=4, processors=78, reached=0.95)),
    # NVIDIA A100 datasheet; forms differ in memory, the A800 in its links alone.
    (r"A100\b.*40GB", Peaks(half=312, tf32=156, single=19.5, memory=1.555, reached=0.87, processors=108, host=32)),
    (r"A[18]00", Peaks(half=312, tf32=156, single=19.5, memory=2.04, reached=0.87, processors=108, host=32)),
    # NVIDIA A30, A40 and A10 datasheets; A10G: NVIDIA A10G datasheet for AWS G5.
    (r"A30", Peaks(half=165, tf32=82, single=10.3, memory=0.93, processors=56, host=32)),
    (r"A40", Peaks(half=149.7, tf32=74.8, single=37.4, memory=0.7, processors=84, host=32)),
    (r"A10G", Peaks(half=70, tf32=35, single=35, memory=0.6, processors=80, host=32)),
    (r"A10", Peaks(half=125, tf32=62.5, single=31.2, memory=0.6, processors=72, host=32)),
    # NVIDIA L40S, L40 and L4 datasheets; L4's lists rates with sparsity.
    (r"L40S", Peaks(half=362.05, tf32=183, single=91.6, fp8=733, memory=0.86, processors=142, host=32)),
    (r"L40", Peaks(half=181.05, tf32=90.5, single=90.5, fp8=362, memory=0.86, processors=142, host=32)),
    (r"L4", Peaks(half=121, tf32=60, single=30.3, fp8=242.5, memory=0.3, processors=58, host=32)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A; GeForce: with fp32 accumulation, half of fp16's.
    (r"RTX 5090", Peaks(half=209.5, tf32=104.8, single=104.8, fp8=419)),
    # NVIDIA Ada GPU architecture whitepaper, appendices A and B.
    (r"RTX 6000 Ada", Peaks(half=364.2, tf32=182.1, single=91.1, fp8=728.5)),
    (r"RTX 4090", Peaks(half=165.2, tf32=82.6, single=82.6, fp8=330.3)),
    (r"RTX 4080 SUPER", Peaks(half=104.4, tf32=52.2, single=52.2, fp8=208.9)),
    (r"RTX 4080", Peaks(half=97.5, tf32=48.7, single=48.7, fp8=194.9)),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A and table of RTX A6000.
    (r"RTX A6000", Peaks(half=154.8, tf32=77.4, single=38.7)),
    (r"RTX 3090 Ti", Peaks(half=80, tf32=40, single=40)),
    (r"RTX 3090", Peaks(half=71, tf32=35.6, single=35.6)),
    # NVIDIA T4 and V100 datasheets: no TF32, no bf16.
    (r"T4", Peaks(half=65, tf32=None, single=8.1, bf16=False, memory=0.3, processors=40, host=16)),
    (r"V100S-PCIE", Peaks(half=130, tf32=None, single=16.4, bf16=False, memory=1.13, processors=80, host=16)),
    (r"V100-PCIE", Peaks(half=112, tf32=None, single=14, bf16=False, memory=0.9, processors=80, host=16)),
    (r"V100-SXM2", Peaks(half=125, tf32=None, single=15.7, bf16=False, memory=0.9, processors=80, host=16)),
    # AMD Instinct MI300 and MI350 series datasheets; rates without sparsity.
    (r"MI355X", Peaks(half=2516.6, tf32=None, single=157.3, fp8=5033.2, memory=8, reached=0.55, processors=256)),
    (r"MI350X", Peaks(half=2306.9, tf32=None, single=144.2, fp8=4613.7, memory=8, reached=0.55, processors=256)),
    (r"MI3(?:00|25)X", _MI300(half=1307.4, tf32=653.7, single=163.4, fp8=2614.9, processors=304)),
    (r"MI300A", _MI300(half=980.6, tf32=490.3, single=122.6, fp8=1961.2, processors=228)),
    # AMD Instinct MI200 series datasheet: 383 and 95.7 (362.1 and 90.5) for the two dies together; matrix rates.
    (r"MI250X", Peaks(half=191.5, tf32=None, single=47.9, memory=1.6, processors=104, host=32)),
    (r"MI2[15]0", Peaks(half=181, tf32=None, single=45.3, memory=1.6, processors=104, host=32)),
)

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def find_peaks(device_name: str) -> Peaks | None:
    """The row of a device's name; None: it is not in the table, or is a slice of a device (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    found = (peaks for pattern, peaks in _TABLE if re.search(rf"\b{pattern}\b", device_name, re.IGNORECASE))
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
