"""The points of a step where a rank may hold most, and what the arithmetic of all engines shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from lightning_shard.engines.facts import DeepSpeedFacts
from lightning_shard.memory import KINDS, KindBytes, MemoryAccount
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts

POINTS = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What one rank holds at the three points of a step where there may be most, without activations."""

    forward: MemoryAccount
    """While the unit computes that needs most."""

    backward: MemoryAccount
    """While the unit is reduced that needs most, with all gradients there that the engine keeps."""

    step: MemoryAccount
    """While the optimizer steps."""

    at_end: int = 0
    """Of backward's communication on the device, the bytes that are there at its end alone: copies for a reduction."""

    made: int = 0
    """Of backward's gradients on the device, one as backward makes it, which a trace has among its activations."""

    moved: int = 0
    """Of backward's gradients on the device, the bytes that are in a bucket when they are reduced after backward."""

    left: int = 0
    """Bytes of gradients as backward made them, on the device beside those that the optimizer steps with."""

    waiting: int = 0
    """Bytes of earlier micro-batches' gradients that the last one's are added to or wait beside; stage 2's and 3's
    sums are not among them."""

    @property
    def largest(self) -> MemoryAccount:
        """Each kind at the point where there is most of it."""
        return MemoryAccount(
            **{
                place.name: KindBytes(
                    **{k: max(getattr(getattr(self, p), place.name).__dict__[k] for p in POINTS) for k in KINDS}
                )
                for place in fields(MemoryAccount)
            }
        )

    @property
    def resting(self) -> MemoryAccount:
        """Between two steps: no gradients, nothing gathered or in flight."""
        device, host = self.step.device, self.step.host
        return MemoryAccount(
            device=replace(device, gradients=0, gathered=0, communication=0),
            host=replace(host, gradients=0, gathered=0, communication=0),
            nvme=self.step.nvme,
        )


def optimizer_bytes(elements: Iterable[tuple[int, torch.dtype]], optimizer: OptimizerFacts) -> int:
    """Bytes of the state of stepped tensors, given as elements and dtype."""
    total = sum(optimizer.uncut.values())
    for count, dtype in elements:
        total += sum(count * (slot or dtype).itemsize for slot in optimizer.slots) + optimizer.fixed_bytes
    return total


def seen_bytes(parameters: Iterable[ParameterFacts], compute: torch.dtype) -> int:
    """Bytes of whole parameters as forward sees them."""
    return sum(p.numel * p.seen_in(compute).itemsize for p in parameters)


def reduction_copies(model: ModelFacts, engine: DeepSpeedFacts, per_element: int) -> tuple[int, int]:
    """Bytes of the copies that the reduction of a bucket makes, and those of them that are made after backward alone.

    What fits into one bucket is reduced when all of it is there.
    """
    numel = sum(p.numel for p in model.trainable)
    copies = min(numel, engine.reduce_bucket_size) * per_element
    return copies, copies if numel <= engine.reduce_bucket_size else 0
