"""Find an optimizer's needs for sharded steps by stepping a copy of it. An elementwise optimizer steps shards like full
parameters. One that uses a whole tensor (a norm, rows and columns, blocks of a quantised state) needs full parameters.
One that couples parameters can't be divided over ranks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.engines.memory_breakdown import tensors_in
from lightning_shard.errors import ConfigurationError
from lightning_shard.resume.rng import rng_state, same, set_rng_state, undrawn
from lightning_shard.tensors.flat import has_tensors_inside, local

# Block-wise states quantise from 4,096 elements on, in blocks of at most 2,048, and no slice ends at a block's end.
_SHAPES = {0: (), 1: (18_432,), 2: (128, 144), 3: (32, 24, 24), 4: (16, 12, 12, 8)}
_CUTS = (4_999, 11_111)
_CPU = torch.device("cpu")
_FEW = {0: (), 1: (96,), 2: (8, 12), 3: (4, 4, 6), 4: (4, 4, 3, 2)}
"""Small shapes come first, because Shampoo takes roots of a matrix with the square of the number of elements."""
_FEW_CUTS = (32, 64)  # Multiples of a CPU's SIMD vector.
_STEPS = 3
_FEW_STEPS = 30  # Longer than warm-ups and than intervals of updates.

_SHORT = 7
"""Elements of slices shorter than a SIMD vector: some fused kernels round in another way at a tensor's end."""

_MANY = 64 * _SHORT

_ELEMENTWISE = ("deepspeed.ops.adam.", "deepspeed.ops.adagrad.", "deepspeed.ops.lion.")
"""DeepSpeed's optimizers of flat tensors. Some have counts in C++, so that a copy would step the original."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The inputs of an optimizer's step besides values and gradients of single elements."""

    full: bool = False  # An element's step depends on other elements, so shards can't be stepped.
    loss: bool = False  # The step reads the loss that a closure returns, or requires a closure.
    again: bool = False  # The closure must compute the loss of changed values, or more than once.
    draws: bool = False  # The step draws random numbers.

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(**{name: value or getattr(other, name) for name, value in vars(self).items()})


def probe(
    optimizer: Optimizer, *, dtype: torch.dtype, aligned: bool, alone: bool, device: torch.device = _CPU
) -> Needs:
    """Find the needs of ``optimizer`` by copies of it that step made-up tensors: full and sliced, together and alone,
    and as DTensors if it has such parameters. All ranks call it. Live tensors and random generators do not change.
    ``dtype``: the masters'. ``alone``: each rank steps all parameters. ``device``: the run's. ConfigurationError: the
    step couples parameters, draws random numbers in fp32 or under ``aligned``, or can't be tried.
    """
    if f"{type(optimizer).__module__}.".startswith(_ELEMENTWISE):
        return Needs()
    known = _found.setdefault(type(optimizer), {})
    needs = Needs()
    inner = [type(value) for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    for group in optimizer.param_groups:
        # Hyperparameters that choose the computation: non-numbers, and whether a number is 0.
        flags = {
            k: bool(v) if isinstance(v, int | float | Tensor) else repr(v) for k, v in group.items() if k != "params"
        }
        # Parameters that stage 3 has sharded are empty.
        shapes = [getattr(p, "ds_shape", p.shape) for p in group["params"] if p.requires_grad]
        for ndim in sorted({min(len(shape), max(_SHAPES)) for shape in shapes}):
            placed = frozenset(p.placements for p in group["params"] if isinstance(p, DTensor))
            kind = (ndim, dtype, aligned, alone, placed, *inner, *sorted(flags.items()))
            if kind not in known:
                tried = partial(_try, optimizer, group, dtype=dtype, aligned=aligned, alone=alone, device=device)
                few = Needs()
                # torch's optimizers have no warm-ups and no intervals of updates.
                with suppress(_CanNotTry):  # It may require more elements.
                    few = few if type(optimizer).__module__.startswith("torch.optim.") else tried(_FEW[ndim])
                known[kind] = few if few.full else few | tried(_SHAPES[ndim])
            needs |= known[kind]
    return needs


_found: WeakKeyDictionary[type[Optimizer], dict[tuple[Any, ...], Needs]] = WeakKeyDictionary()
"""The needs found in this process, by class and by the hyperparameters that choose the computation."""


class _CanNotTry(ConfigurationError):
    """A step over made-up tensors fails."""


def _try(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    aligned: bool,
    alone: bool,
    device: torch.device,
) -> Needs:
    device = next((p.device for p in group["params"] if not p.is_meta), device)
    generator = torch.Generator().manual_seed(0)

    def made() -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    # Several steps, for optimizers that follow their progress. The two sizes differ, so that a mean over both shows.
    steps = _STEPS if shape == _SHAPES[len(shape)] else _FEW_STEPS
    values, *different = [[made(), 100 * made()] for _ in range(1 + steps)]
    # Orthogonal to the value, because AdamP and its variants then project whole parameters.
    different[0] = [_turned(value) for value in values]
    # The first one twice, or optimizers that estimate the step size from their progress (Prodigy) do not change it.
    gradients = [different[0], *different]
    name = type(optimizer).__qualname__
    with undrawn():
        trial = _Trial(optimizer, group)
        try:
            trial.step_both(values, gradients)
        except Exception as error:
            if alone:
                return Needs(full=True)
            raise _CanNotTry(
                f"{name} can't be tried on a tensor of shape {shape} ({type(error).__name__}: {error}), so its steps "
                "on shards of a parameter are unknown. Use shard_ddp, or an optimizer that makes its state when it "
                "steps and refers to its parameters only in its groups."
            ) from error
        needs, exact = trial.needs, aligned or dtype == torch.float32
        if alone and (needs.again or needs.draws or trial.coupled):
            return replace(needs, full=not needs.again)
        if needs.draws and exact:
            raise ConfigurationError(
                f"{name} draws random numbers in its step, which can't be the same if parameters are sharded. Use "
                "shard_ddp, or an optimizer that draws none."
            )
        if needs.draws:
            return needs
        if trial.coupled:
            raise ConfigurationError(
                f"{name} couples parameters: stepped together they get other values than apart, so that no rank can "
                "step its own part of them. Use shard_ddp, or an optimizer that steps each parameter by itself."
            )
        first = [pair[0] for pair in gradients]
        same = not shape or trial.same_in_parts(trial.together[0], values[0], first, exact=exact)
        if not trial.insides and same and trial.takes_shards(dtype):
            return needs
        if needs.again:
            raise ConfigurationError(
                f"{name} needs full parameters and a closure that computes the loss again, but with sharded parameters "
                "it is called after backward, with only the loss. Use shard_ddp."
            )
        return replace(needs, full=True)


class _Trial:
    """Steps copies of an optimizer over made-up tensors."""

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        self._optimizer, self._group = optimizer, group
        self._losses: Sequence[float] = ()  # Of the closures, if steps need one.

    def step_copy(
        self, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], losses: Sequence[float] = ()
    ) -> list[Tensor]:
        """The values after steps of a copy with each of ``gradients``, and with closures that return ``losses``."""
        losses = losses or self._losses
        tensors: list[Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
        copy = copy_of(self._optimizer, [_group_over(tensors, self._group)])
        if callable(train := getattr(copy, "train", None)):
            # schedulefree requires it before a step.
            train()
        # The class's function: a schedule may have replaced the instance's to count calls.
        step: Any = type(copy).step
        self._again = False  # Whether a closure was called twice in a step, or after values changed.
        for index, each in enumerate(gradients):
            for tensor, gradient in zip(tensors, each, strict=True):
                tensor.grad = gradient.clone()
            closure = _Closure(tensors, losses[index]) if losses else None
            step(copy, *([] if closure is None else [closure]))
            self._again |= closure is not None and closure.again
        # Whether the state is not elementwise, such as quantised tensors. All values have one shape.
        self._insides = not _of_elements(copy.state, values[0].shape)
        return [tensor.detach() for tensor in tensors]

    def step_both(self, values: list[Tensor], gradients: list[list[Tensor]]) -> None:
        """Step two tensors of one shape, together and each alone."""
        random, losses = rng_state(), [float(4 ** (index % 3)) for index in range(len(gradients))]
        try:
            self.together = self.step_copy(values, gradients)
        except Exception as error:
            self._losses = losses
            try:
                self.together = self.step_copy(values, gradients)
            except Exception:
                raise error from None
        asks, draws, again, self.insides = bool(self._losses), not same(random, rng_state()), self._again, self._insides
        reads = False
        with suppress(Exception):  # It may accept no closure.
            given = []
            for each in ([1.0] * len(losses), losses):
                set_rng_state(random)
                given.append(self.step_copy(values, gradients, each))
            again = self._again
            if reads := not all(map(_equal, *given)):
                self._losses, self.together, self.insides = losses, given[1], self._insides
        apart = [self.step_copy([values[i]], [[pair[i]] for pair in gradients])[0] for i in range(2)]
        self.coupled = not all(map(_equal, self.together, apart))
        self.needs = Needs(loss=asks or reads, again=again, draws=draws)

    def same_in_parts(self, full: Tensor, value: Tensor, gradients: Sequence[Tensor], *, exact: bool) -> bool:
        """True if stepping 1-D slices equals stepping the full tensor. ``exact``: 7-element slices too (SIMD tails)."""
        try:
            for begin, end in pairwise([0, *(_FEW_CUTS if full.numel() < _CUTS[0] else _CUTS), full.numel()]):
                own = [[gradient.view(-1)[begin:end]] for gradient in gradients]
                if not _equal(self.step_copy([value.view(-1)[begin:end]], own)[0], full.view(-1)[begin:end]):
                    return False
            if not exact:
                return True
            value, *gradients = [tensor.view(-1)[:_MANY].clone() for tensor in (value, *gradients)]
            value[::2] = 0  # so that no bit of an update is rounded away
            (together,) = self.step_copy([value], [[gradient] for gradient in gradients])
            apart = self.step_copy(value.split(_SHORT), [gradient.split(_SHORT) for gradient in gradients])
        except Exception:
            return False  # It may require more dimensions, or more elements than a shard has.
        return _equal(together, torch.cat(apart))

    def takes_shards(self, dtype: torch.dtype) -> bool:
        """Whether a group of DTensors can be stepped: DTensor lacks some operators, such as Rprop's."""
        like = next((p for p in self._group["params"] if isinstance(p, DTensor)), None)
        if like is None:
            return True
        local = torch.ones((2,) * like.ndim, dtype=dtype, device=like.to_local().device)
        part = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
        try:
            self.step_copy([part], [[part], [-part]])
        except Exception:
            return False
        return True


def _turned(value: Tensor) -> Tensor:
    """A tensor orthogonal to ``value``, also row by row."""
    if value.ndim == 0:
        return value.clone()
    first, second = value.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([second, -first], -1).flatten(-2)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _of_elements(state: Any, shape: torch.Size) -> bool:
    """Whether ``state`` has only scalars and tensors of the parameter's ``shape``. Other state may be used later, such
    as preconditioners that are first applied after hundreds of steps.
    """
    if isinstance(state, Mapping):
        return all(_of_elements(value, shape) for value in state.values())
    if isinstance(state, list | tuple):
        return all(_of_elements(value, shape) for value in state)
    if isinstance(state, Tensor):
        return not has_tensors_inside(state) and (state.numel() <= 1 or state.shape == shape)
    return state is None or isinstance(state, int | float | str)


class _Closure:
    """Returns a loss, and records whether it is called more than once or after values changed."""

    def __init__(self, tensors: Sequence[Tensor], loss: float) -> None:
        self._tensors = [local(tensor).detach() for tensor in tensors]
        self._before = [tensor.clone() for tensor in self._tensors]
        self._loss = torch.tensor(loss, device=tensors[0].device)
        self._called, self.again = False, False

    def __call__(self) -> Tensor:
        self.again |= self._called or not all(map(_equal, self._tensors, self._before))
        self._called = True
        return self._loss.clone()


def _group_over(tensors: list[Tensor], group: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with other parameters, and with a learning rate above 0."""
    lr = group.get("lr")
    # A warm-up may begin at 0, and a step that changes nothing shows nothing.
    shown = {"lr": lr + 1e-2} if isinstance(lr, int | float | Tensor) and float(lr) == 0 else {}
    return {**group, **shown, "params": tensors}


@torch.no_grad()
def rests_at_zero(optimizer: Optimizer) -> bool:
    """Whether steps with zero gradients change nothing. False if it can't be tried."""
    if f"{type(optimizer).__module__}.".startswith(_ELEMENTWISE):
        return False
    value, gradients = torch.ones(3), [[torch.ones(3)], [torch.zeros(3)]]
    for group in optimizer.param_groups:
        step = partial(_Trial(optimizer, group).step_copy, [value])
        try:
            (once,), (twice,) = step(gradients[:1]), step(gradients)
        except Exception:
            return False
        if not torch.equal(once, twice):
            return False
    return True


def copy_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Copy an optimizer's class and attributes with other groups, without state and hooks. Inner optimizers too."""
    copy: Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            setattr(copy, name, copy_of(value, groups))
        elif any(value is group["params"] for group in optimizer.param_groups):
            # LBFGS refers to the list of its only group.
            setattr(copy, name, groups[0]["params"])
        elif name not in ("param_groups", "state") and any(id(t) in stepped for t in tensors_in(value)):
            raise ValueError(f"its attribute {name} holds the parameters")
        elif name.endswith("_hooks"):
            setattr(copy, name, type(value)())
    copy.param_groups, copy.state = groups, defaultdict(dict)
    return copy
