"""How long a device takes for the operators of a traced step: a roofline of each, as torch runs it or compiled.

An operator takes the longest of its arithmetic, its bytes and its launch. Products are split into tiles, and tiles into
waves over the device's processors, as NVIDIA's "Matrix Multiplication Background User's Guide" describes (sections 3
and 4): what a tile or a wave does not fill is lost. What large products reach of a data sheet's peak was measured: 0.87
on an A100 (Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS), and in a model's shapes 0.48 on an
MI300X and 0.73 on an H100 (SemiAnalysis, "MI300X vs H100 vs H200, part 1: training", December 2024), where power ends
it: 0.70 was fitted for Hopper as `step_time.IN_A_STEP` was. Other devices are taken to be like one of these. Fused
attention: FlashAttention-2 (arXiv 2307.08691, section 4), whose backward computes the scores again, in five products to
forward's two.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lightning_shard.meters.flops import FORMULAS
from lightning_shard.tensors import tracing
from lightning_shard.tensors.tracing import TorchDispatchMode, storage_key, tree_leaves


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device reaches, and not what its data sheet says."""

    products: float  # FLOP/s of large products in 16 bits, or in the one dtype that is planned.
    single: float  # FLOP/s of large products in fp32.
    memory: float  # Bytes per second that its memory reads and writes, taken together.
    attention: float = 0.45  # Of ``products``, what fused attention reaches.
    processors: int = 132  # That take a tile of a product each.
    launch: float = 7e-6  # Seconds of the host for an operator that is not compiled: Python, autograd, dispatch.
    kernel: float = 2.5e-6  # Seconds that the smallest kernel takes on the device.
    host: float = 25e9  # Bytes per second of the link to the host's memory.
    # Of the time of a collective as if inside a node, what its kernels take from others (fitted as `IN_A_STEP`): NCCL
    # has up to 32 thread blocks, one a processor, fewer where links between nodes are slower.
    shared: float = 0.35


_TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 64, 0.6))
"""Rows, columns and what they reach of the best; the smallest fill the device where matrices are small."""
_SPLIT = 2048  # Of the summed dim, from which on a library splits it where tiles are few.


def product_seconds(device: Device, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> float:
    peak = device.single if dtype == torch.float32 else device.products
    found = []
    for rows, columns, reached in _TILES:
        tiles, splits = batch * ceil(m / rows) * ceil(n / columns), max(1, min(8, k // _SPLIT))
        # The fewest waves, with the summed dim full or split.
        filled = min(ceil(tiles * split / device.processors) / split for split in {1, splits})
        found.append(filled * device.processors * 2 * rows * columns * k / (peak * reached))
    return min(found)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The operators of a part of a step; times in seconds of the device."""

    products: float = 0.0  # Products, convolutions and attention.
    memory: float = 0.0  # All others, which take as long as their bytes.
    operators: float = 0.0  # How many the host launches.
    fused: float = 0.0  # As ``memory`` where the part is compiled.
    kernels: float = 0.0  # As ``operators`` where it is compiled.

    def line(self, other: "Work", ratio: float) -> "Work":
        """The part at ``ratio`` of the way to ``other``, the same part at another batch."""
        a, b = vars(self), vars(other)
        return Work(**{name: max(0.0, a[name] + (b[name] - a[name]) * ratio) for name in a})


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""With the place of the first matrix among the arguments."""
_ATTENTION = {**dict.fromkeys(tracing.ATTENTION, 1.0), **dict.fromkeys(tracing.ATTENTION_BACKWARD, 1.25)}
_ROWS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select, _aten.nll_loss_forward}
"""Which read as much as they write, and not all of what they are given."""
_NO_KERNEL = ("empty", "detach", "_unsafe_view", "alias", "lift_fresh", "_local_scalar_dense")


def _bytes(tensor: Tensor) -> int:
    # What is expanded is read once.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def arithmetic_seconds(device: Device, func: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """Seconds of a product, a convolution or attention; None: it is none of these."""
    packet = func.overloadpacket
    if packet in _PRODUCTS:
        a, b = args[_PRODUCTS[packet] :][:2]
        batch = a.shape[0] if a.ndim == 3 else 1
        return product_seconds(device, batch, a.shape[-2], a.shape[-1], b.shape[-1], a.dtype)
    if packet not in FORMULAS:
        return None
    dtype = next(t.dtype for t in tree_leaves(args) if isinstance(t, Tensor))
    peak = device.single if dtype == torch.float32 else device.products
    reached = device.attention / _ATTENTION[packet] if packet in _ATTENTION else 0.7
    return float(FORMULAS[packet](*args, **kwargs, out_val=result) / (peak * reached))


class OperatorTimes(TorchDispatchMode):
    """Adds up the operators of each part; what is read and written as torch runs it, and as if fused: all operators
    between two products one kernel, with what only backward reads computed again there.
    """

    def __init__(self, device: Device, part: Callable[[], int]) -> None:
        """``part``: the number of the part that runs now."""
        super().__init__()
        self.device, self.part = device, part
        self.parts: dict[int, Work] = defaultdict(Work)
        # Of operators that are fused: the part, how many kernels were before, and whether it has an operator.
        self._group, self._open = (0, 0), False
        self._made: dict[int, tuple[int, int]] = {}  # Storage to the group that made it and has not written it.
        self._read: set[int] = set()  # By the group so far.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (func.is_view or func.namespace == "prim" or any(part in func.name() for part in _NO_KERNEL)):
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            # What gives back nothing writes to what it was given first: a tensor, or a list of them.
            outputs = outputs or inputs[: len(args[0]) if args and isinstance(args[0], list | tuple) else 1]
            self._add(arithmetic_seconds(self.device, func, args, kwargs, result), func, inputs, outputs)
        return result

    def _add(self, arithmetic: float | None, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        part, device, product = self.part(), self.device, arithmetic is not None
        if product or self._group[0] != part:
            self._group, self._open, self._read = (part, self._group[1] + 1), False, set()
        work, written = self.parts[part], sum(map(_bytes, outputs))
        moved = 2 * written if func.overloadpacket in _ROWS else written + sum(map(_bytes, inputs))
        seconds = max(moved / device.memory, device.kernel)
        fused = work.fused + self._fused(inputs, outputs, writes=product) / device.memory
        work = replace(work, operators=work.operators + 1, kernels=work.kernels + (not self._open), fused=fused)
        self._open = not product  # what comes after a product is another kernel
        if arithmetic is not None:
            self._group = part, self._group[1] + 1
            self.parts[part] = replace(work, products=work.products + max(arithmetic, seconds))
        else:
            self.parts[part] = replace(work, memory=work.memory + seconds)

    def _fused(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, writes: bool) -> int:
        """Bytes that are read from and written to memory by a fused kernel for the sake of this operator."""
        count = 0
        for tensor in inputs:
            key = storage_key(tensor)
            maker = self._made.get(key)
            if maker == self._group or key in self._read:
                continue
            # What a group of the same part made is written because of this; a product reads it for itself.
            count += _bytes(tensor) * ((maker is not None and maker[0] == self._group[0]) + (not writes))
            self._made.pop(key, None)
            self._read.add(key)
        for key in map(storage_key, outputs):
            self._made.pop(key, None)
            if not writes:
                self._made[key] = self._group
        return count
