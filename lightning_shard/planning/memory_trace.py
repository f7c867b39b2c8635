"""One training step of a module on tensors without data: activations by shard unit, and FLOPs.

The step runs once, for no engine in particular: the module whole, its parameters as forward sees them, casts and
activation checkpointing installed as every engine here installs them. What an engine holds beside it at each part of
the step is arithmetic (`lightning_shard.planning.step_points`): one trace serves all engines and numbers of ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_shard.engines.transforms import Checkpointing, checkpoint_forward, checkpointed_modules
from lightning_shard.engines.units import Unit
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters import fake_tensors
from lightning_shard.planning.attention import fused_attention
from lightning_shard.planning.live_bytes import DataDependent, LiveBytes, Segment, live_tensors
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one training step makes, per micro-batch."""

    segments: tuple[Segment, ...]
    """In the order of the step."""

    batch_size: int
    """Samples per rank and micro-batch."""

    forward_flops: int = 0
    backward_flops: int = 0
    """With what activation checkpointing computes again."""

    @property
    def flops(self) -> int:
        """Of the whole step."""
        return self.forward_flops + self.backward_flops

    @property
    def order(self) -> tuple[str, ...]:
        """The units in the order in which forward first reaches them, the root's "" left out."""
        return tuple(dict.fromkeys(s.unit for s in self.segments if s.phase == "forward" and s.unit))


class TraceError(ConfigurationError):
    """A step that can't be traced; the message names the operation, and where in the user's code it is."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """How to run a step of a module."""

    loss: Callable[[Any], Any]
    """``(batch) -> loss``, or a mapping with ``loss``: the module's ``training_step``."""

    batch: Any
    """The first batch of the user's data: tensors on the CPU in any nesting."""

    units: Sequence[Unit] = ()
    checkpointing: Checkpointing = None
    checkpoint_units: Sequence[Unit] | None = None
    """The units that ``checkpointing`` goes by, where they are others."""


def trace_step(root: nn.Module, step: Step, policy: PrecisionPolicy, mode: Any, *, scale: int = 1) -> Trace:
    """Run one step of a module whose tensors `fake_tensors.make_fake` has made fake.

    Args:
        root: the LightningModule.
        step: how to run it.
        policy: the dtypes of the run.
        mode: from `fake_tensors.fake_mode`.
        scale: run on the batch repeated so many times.

    Raises:
        TraceError: the step depends on data, has an operation without a fake implementation, or fails.
    """
    batch, size = scaled(step.batch, scale)
    with ExitStack() as stack:
        stack.callback(_restore(root))
        see_in(root, policy.compute)
        if policy.compute != torch.float32:
            stack.callback(install_casts(root, policy.compute, output=policy.output))
        units = step.units if step.checkpoint_units is None else step.checkpoint_units
        for module in checkpointed_modules(root, list(units), step.checkpointing):
            stack.callback(checkpoint_forward(module, step.checkpointing))
        live = LiveBytes(live_tensors(root))
        watch = _Watch(root, step.units, live)
        stack.callback(watch.remove)
        root.train()
        try:
            with mode:
                batch = tree_map(lambda t: fake_tensors.as_fake(t, mode) if isinstance(t, Tensor) else t, batch)
                live.track(batch)
                with fused_attention(), live:
                    forward = watch.run(step.loss, batch)
        except Exception as error:
            raise TraceError(explained(error, live.last)) from error
        finally:
            root.zero_grad(set_to_none=True)
    return Trace(
        segments=tuple(live.segments),
        batch_size=size,
        forward_flops=forward,
        backward_flops=live.flops - forward,
    )


class _Watch:
    """Tells where in a step each operation is, and drops the gradients of a unit once it has all of them."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], live: LiveBytes) -> None:
        self.live = live
        self.inside: list[str] = []
        self.backward = False
        self.handles: list[Any] = []
        self.done: list[str] = []
        unit_of: dict[int, str] = {}
        for unit in units:
            for module in unit.modules:
                for parameter in module.parameters():
                    unit_of.setdefault(id(parameter), unit.names[0])
                self.handles += [
                    module.register_forward_pre_hook(self._enter(unit.names[0]), prepend=True),
                    module.register_forward_hook(self._leave(unit.names[0]), always_call=True),
                ]
        self.waiting: dict[str, set[int]] = {}
        self.parameters: dict[str, list[Tensor]] = {}
        for parameter in root.parameters():
            if parameter.requires_grad:
                name = unit_of.get(id(parameter), "")
                self.waiting.setdefault(name, set()).add(id(parameter))
                self.parameters.setdefault(name, []).append(parameter)
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))

    def run(self, loss_of: Callable[[Any], Any], batch: Any) -> int:
        """The step; FLOPs of its forward."""
        self.live.begin("forward", "")
        loss = loss_of(batch)
        loss = loss["loss"] if isinstance(loss, Mapping) else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"training_step returned {type(loss).__name__}, and not a loss")
        forward = self.live.flops
        self.backward = True
        self.live.begin("backward", "")
        loss.backward()
        self.live.finish()
        return forward

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()

    def _enter(self, unit: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            if not self.backward:
                self.inside.append(unit)
                self.live.begin("forward", unit)

        return enter

    def _leave(self, unit: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.backward or not self.inside:
                return
            self.inside.pop()
            self.live.begin("forward", self.inside[-1] if self.inside else "")
            tree_map(lambda t: self._hook_output(t, unit), output)

        return leave

    def _hook_output(self, tensor: Any, unit: str) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.live.begin("backward", unit))

    def _accumulated(self, unit: str) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.live.is_gradient(parameter.grad)
            self.live.first_gradient()
            self.waiting[unit].discard(id(parameter))
            if self.waiting[unit] or unit in self.done:
                return
            self.live.note()
            segment = self.live.segments[-1]
            # The engines reduce them here, and keep what they keep.
            segment.reduced = max(segment.reduced, self.live.activations + self.live.gradients)
            for own in self.parameters[unit]:
                own.grad = None
            self.done.append(unit)
            segment.done = tuple(self.done)
            if unit:
                self.live.begin("backward", "")
                self.live.segments[-1].done = tuple(self.done)

        return accumulated


def see_in(root: nn.Module, compute: torch.dtype) -> None:
    """Put every floating parameter in place as forward sees it; ties stay ties."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == compute:
                continue
            if id(parameter) not in made:
                seen = nn.Parameter(parameter.detach().to(compute), requires_grad=parameter.requires_grad)
                made[id(parameter)] = (parameter, seen)
            module._parameters[name] = made[id(parameter)][1]


def _restore(root: nn.Module) -> Callable[[], None]:
    """A function that puts the parameters of now back."""
    before = [(module, dict(module._parameters)) for module in root.modules()]

    def restore() -> None:
        for module, parameters in before:
            module._parameters.update(parameters)

    return restore


def batch_size_of(batch: Any) -> int:
    """Samples of a batch: the length of the first tensor in it that has one."""
    sizes: list[int] = []
    tree_map(lambda t: sizes.append(t.shape[0]) if isinstance(t, Tensor) and t.ndim else None, batch)
    return sizes[0] if sizes else 1


def scaled(batch: Any, scale: int) -> tuple[Any, int]:
    """A batch repeated ``scale`` times along the samples, and its size."""
    size = batch_size_of(batch)

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != size:
            return value
        return value.repeat(scale, *[1] * (value.ndim - 1))

    return (tree_map(repeated, batch) if scale != 1 else batch), size * scale


def error_location(error: BaseException) -> str:
    """``file:line`` of the last frame of an error in the user's own code, or ``""``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ("site-packages", "/lightning_shard/"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def explained(error: BaseException, operation: str) -> str:
    """What failed, where, and, where that is the reason, that there is no data."""
    place = error_location(error)
    at = f", at {place}" if place else ""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
    operation = str(getattr(error, "func", operation))
    told = f"the step can't be traced without data: operation {operation}{at} ({reason})."
    if isinstance(error, DataDependent) or hasattr(error, "func") or "fake impl" in str(error):
        return (
            f"{told} A size or a branch that depends on values does that, and a kernel without a fake implementation "
            "(torch.library.register_fake)"
        )
    return told.rstrip(".")
