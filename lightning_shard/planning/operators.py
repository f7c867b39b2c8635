"""Predict the time of a traced step's operators on a device, by a roofline for each, in eager mode or compiled.

An operator takes the longest of its arithmetic, its bytes and its launch. Products are split into tiles, and tiles into
waves over the device's processors, as in NVIDIA's "Matrix Multiplication Background User's Guide" (sections 3 and 4).
Partly filled tiles and waves cost the time of full ones. The share of a data sheet's peak that large products
reach was measured: 0.87 on an A100 (Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS), and in a
model's shapes 0.48 on an MI300X and 0.73 on an H100 (SemiAnalysis, "MI300X vs H100 vs H200, part 1: training", December
2024), limited by power. 0.70 was fitted for Hopper, like `step_time.IN_A_STEP`. Other devices are assumed to be like
one of these. Fused attention follows FlashAttention-2 (arXiv 2307.08691, section 4), whose backward computes the scores
again, in five products to forward's two.
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
    """Rates that a device reaches, which are below its data sheet's."""

    products: float  # FLOP/s of large products in 16 bits, or in the one dtype that is planned.
    single: float  # FLOP/s of large products in fp32.
    memory: float  # Bytes per second read from and written to its memory, in sum.
    attention: float = 0.45  # Share of ``products`` that fused attention reaches.
    processors: int = 132  # Each computes one tile of a product.
    launch: float = 7e-6  # Host seconds to launch an operator in eager mode: Python, autograd, dispatch.
    kernel: float = 2.5e-6  # Device seconds of the smallest kernel.
    host: float = 25e9  # Bytes per second of the link to the host's memory.
    # Share of a collective's time inside a node that its kernels take from other kernels (fitted like `IN_A_STEP`).
    # NCCL has up to 32 thread blocks, one per processor, and fewer if links between nodes are slower.
    shared: float = 0.35


_TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 64, 0.6))
"""Rows, columns and relative speed. The smallest tiles fill the device if matrices are small."""
_SPLIT = 2048  # Size of the summed dim from which a library splits it if there are few tiles.


def product_seconds(device: Device, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> float:
    peak = device.single if dtype == torch.float32 else device.products
    found = []
    for rows, columns, reached in _TILES:
        tiles, splits = batch * ceil(m / rows) * ceil(n / columns), max(1, min(8, k // _SPLIT))
        # The fewest waves, with or without a split of the summed dim.
        filled = min(ceil(tiles * split / device.processors) / split for split in {1, splits})
        found.append(filled * device.processors * 2 * rows * columns * k / (peak * reached))
    return min(found)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The operators of a part of a step, in seconds of the device."""

    products: float = 0.0  # Time of products, convolutions and attention.
    memory: float = 0.0  # Time of other operators, which is bound by their bytes.
    operators: float = 0.0  # Number of operators that the host launches.
    fused: float = 0.0  # ``memory`` in compiled mode.
    kernels: float = 0.0  # ``operators`` in compiled mode.

    def interpolate(self, other: "Work", ratio: float) -> "Work":
        """The part at ``ratio`` of the way to ``other``, which is the same part at another batch."""
        a, b = vars(self), vars(other)
        return Work(**{name: max(0.0, a[name] + (b[name] - a[name]) * ratio) for name in a})


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""With the index of the first matrix among their arguments."""
_ATTENTION = {**dict.fromkeys(tracing.ATTENTION, 1.0), **dict.fromkeys(tracing.ATTENTION_BACKWARD, 1.25)}
_ROWS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select, _aten.nll_loss_forward}
"""Operators that read as much as they write, not all of their inputs."""
_NO_KERNEL = ("empty", "detach", "_unsafe_view", "alias", "lift_fresh", "_local_scalar_dense")


def _bytes(tensor: Tensor) -> int:
    # An expanded tensor is read once.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def arithmetic_seconds(device: Device, func: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """Seconds of a product, a convolution or attention. None: another operator."""
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
    """Adds up the operators of each part, both in eager mode and as if compiled.

    Compiled, all operators between two products are one kernel, and tensors that only backward reads are computed again
    there.
    """

    def __init__(self, device: Device, part: Callable[[], int]) -> None:
        """``part`` returns the index of the running part."""
        super().__init__()
        self.device, self.part = device, part
        self.parts: dict[int, Work] = defaultdict(Work)
        # The current fused kernel: its part and the number of kernels before it, and whether it has an operator.
        self._group, self._open = (0, 0), False
        self._made: dict[int, tuple[int, int]] = {}  # Storages that are not written yet, with the group that made them.
        self._read: set[int] = set()  # Storages that the current group has read.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (func.is_view or func.namespace == "prim" or any(part in func.name() for part in _NO_KERNEL)):
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            # An operator without a result writes to its first argument, a tensor or a list of tensors.
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
        self._open = not product  # A product ends the kernel.
        if arithmetic is not None:
            self._group = part, self._group[1] + 1
            self.parts[part] = replace(work, products=work.products + max(arithmetic, seconds))
        else:
            self.parts[part] = replace(work, memory=work.memory + seconds)

    def _fused(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, writes: bool) -> int:
        """Bytes that this operator makes a fused kernel read from and write to memory."""
        count = 0
        for tensor in inputs:
            key = storage_key(tensor)
            maker = self._made.get(key)
            if maker == self._group or key in self._read:
                continue
            # A tensor that another group of this part made has to be written for this operator. A product reads its own
            # inputs.
            count += _bytes(tensor) * ((maker is not None and maker[0] == self._group[0]) + (not writes))
            self._made.pop(key, None)
            self._read.add(key)
        for key in map(storage_key, outputs):
            self._made.pop(key, None)
            if not writes:
                self._made[key] = self._group
        return count
