"""Dynamic loss scaling, by one arithmetic on every engine: the rules of ``torch.amp.GradScaler``, with the hysteresis
and the minimum of Megatron-LM and DeepSpeed.

fp16 gradients below 6e-8 are zero, so the loss is multiplied by a scale, a power of two, before backward, and the fp32
gradients are divided by it. If a gradient of any rank is inf or NaN, every rank skips the step and the scale falls. It
rises after enough good steps.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.arguments import checked_fields
from lightning_shard.errors import CheckpointMismatchError, DataError, PrecisionError
from lightning_shard.tensors import clipping

Gradients = Callable[[Optimizer], Iterable[Tensor]]

LARGEST = 2.0**126  # The scale and its inverse are normal fp32 numbers up to here.


@checked_fields("loss_scale", error=PrecisionError)
@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Settings of a dynamic loss scale.

    Raises:
        PrecisionError: a value that can't work. Scales and factors must be powers of two.
    """

    initial: float = 2.0**16
    """The first scale. A loss that is itself in fp16 needs 2**15 or less, and gets there by a skipped step."""

    growth_factor: float = 2.0
    """Factor of the scale after ``growth_interval`` good steps in a row."""

    backoff_factor: float = 0.5
    """Factor of the scale after an overflow."""

    growth_interval: int = 2000
    """Steps without an overflow before the scale grows."""

    hysteresis: int = 1
    """Number of overflows since the scale last grew until one lowers the scale. Steps with any overflow are skipped.
    1: each lowers the scale."""

    minimum: float = 1.0
    """Lowest scale. An overflow at it ends the run."""

    def __post_init__(self) -> None:
        for name in ("initial", "growth_factor", "backoff_factor", "minimum"):
            value = getattr(self, name)
            if not (0 < value <= LARGEST and 1 / value <= LARGEST and math.frexp(value)[0] == 0.5):
                raise PrecisionError(
                    f"loss_scale.{name} is {value}, but must be a power of two from 2**-126 to 2**126, so that "
                    "gradients are scaled back without rounding."
                )
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                raise PrecisionError(f"loss_scale.{name} is {getattr(self, name)}, but must be 1 or more.")
        if self.growth_factor <= 1 or self.backoff_factor >= 1:
            raise PrecisionError(
                f"loss_scale.growth_factor is {self.growth_factor} and loss_scale.backoff_factor {self.backoff_factor},"
                " but the first must be greater than 1 and the second less."
            )
        if self.minimum > self.initial:
            raise PrecisionError(f"loss_scale.minimum is {self.minimum}, but loss_scale.initial is {self.initial}.")


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """State of the scale, the same on every rank."""

    scale: float  # Factor of the next loss.
    good_steps: int  # Steps since the last overflow or growth.
    overflows_left: int  # Overflows until the scale falls, then 1 until it grows.
    skipped: int = 0  # Steps skipped in the whole run.


def next_state(scaling: LossScaling, state: LossScaleState, *, overflow: bool) -> LossScaleState:
    """The state after a step, which an ``overflow`` skipped. DataError: an overflow at the minimum."""
    if overflow:
        if state.overflows_left > 1:
            return replace(state, good_steps=0, overflows_left=state.overflows_left - 1, skipped=state.skipped + 1)
        if state.scale <= scaling.minimum:
            raise DataError(
                f"Gradients are inf or NaN at the smallest loss scale, {state.scale:g}, after {state.skipped} skipped "
                "steps, so that the scale is not the reason. Look for a loss of inf or NaN, lower the learning rate, "
                "or use precision 'bf16-mixed', whose range is that of fp32."
            )
        scale = max(state.scale * scaling.backoff_factor, scaling.minimum)
        return replace(state, scale=scale, good_steps=0, skipped=state.skipped + 1)
    if state.good_steps + 1 < scaling.growth_interval:
        return replace(state, good_steps=state.good_steps + 1)
    scale = min(state.scale * scaling.growth_factor, LARGEST)
    return replace(state, scale=scale, good_steps=0, overflows_left=scaling.hysteresis)


def state_from_dict(values: dict[str, Any]) -> LossScaleState:
    """The state of its ``asdict``. CheckpointMismatchError: other keys, such as a stock GradScaler's."""
    expected = set(LossScaleState.__dataclass_fields__)
    if set(values) != expected:
        raise CheckpointMismatchError(
            f"the checkpoint's loss scale has the keys {', '.join(sorted(values))}, but must have "
            f"{', '.join(sorted(expected))}. Remove it from the checkpoint to begin with the initial scale."
        )
    return LossScaleState(**values)


class LossScaler:
    """The loss scale of a fit, and the optimizers whose gradients were scaled back in this batch."""

    def __init__(self, scaling: LossScaling) -> None:
        self._scaling = scaling
        self.state = LossScaleState(scale=scaling.initial, good_steps=0, overflows_left=scaling.hysteresis)
        self._overflows: dict[int, bool] = {}

    def begin_batch(self) -> None:
        """Take the next batch's gradients of all optimizers for scaled."""
        self._overflows = {}

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, in fp32, which can hold any scale."""
        return loss.float() * self.state.scale

    @torch.no_grad()
    def unscale_gradients(self, optimizer: Optimizer, gradients: Gradients, *, device: torch.device) -> bool:
        """Divide the gradients of ``optimizer`` by the scale in place, once in a batch. Returns whether any, on any
        rank, is inf or NaN. All ranks call it: one all-reduce of a number on ``device``. ``gradients`` gives this
        rank's, maybe none: full or sharded, plain or DTensors, on the host or on the device.
        """
        if id(optimizer) not in self._overflows:
            found = clipping.unscale_gradients(gradients(optimizer), self.state.scale, device=device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            self._overflows[id(optimizer)] = bool(found.item())
        return self._overflows[id(optimizer)]

    def update_scale(
        self, optimizer: Optimizer, optimizers: Iterable[Optimizer], gradients: Gradients, *, counts: bool
    ) -> None:
        """Move the scale after ``optimizer``'s step. ``counts`` is false for a step skipped for another reason."""
        before, overflow = self.state.scale, self._overflows.pop(id(optimizer))
        if counts:
            self.state = next_state(self._scaling, self.state, overflow=overflow)
        if self.state.scale == before:
            return
        own = {id(gradient) for gradient in gradients(optimizer)}
        for other in optimizers:
            # The other's gradients, from a backward before this step, wait for their own step.
            if other is not optimizer and id(other) not in self._overflows:
                waiting = [gradient for gradient in gradients(other) if id(gradient) not in own]
                clipping.multiply_gradients(waiting, torch.tensor(self.state.scale / before))
