"""Detect and refuse writes to gathered or cast copies of parameters, which would be lost, in a fit's first steps. Add
the setter of ``DTensor.data`` that torch lacks.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_shard.engines import optimizer_remap
from lightning_shard.engines._fsdp2 import full_parameters, gathered_parameters, units_of
from lightning_shard.engines.dtensor_refusals import BETWEEN_STEPS
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.full import own_part
from lightning_shard.tensors.tracing import version
from lightning_shard.text import listed

_DATA: Any = Tensor.data  # The descriptor.
_open: list[object] = []  # One per engine. Engines may end in any order.


@contextmanager
def assignable_data() -> Generator[None, None, None]:
    """Make ``parameter.data = value`` write the shard of a DTensor in this context."""
    own = object()
    _open.append(own)
    DTensor.data = property(_DATA.__get__, _write_shard)  # type: ignore[assignment]
    try:
        yield
    finally:
        _open.remove(own)
        if not _open:
            del DTensor.data


@torch.no_grad()
def _write_shard(parameter: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ConfigurationError(
            f"parameter.data is set to a {type(value).__name__} of {tuple(value.shape)} and {value.dtype}, but the "
            f"parameter is sharded, of {tuple(parameter.shape)} and {parameter.dtype}. The value must be computed "
            "from sharded parameters and have their shape and dtype. Use set_full_tensor for a full value."
        )
    placed = value.redistribute(parameter.device_mesh, parameter.placements)
    parameter.to_local().copy_(placed.to_local())


class ForeignStepCheck:
    """Refuses steps of optimizers that are not the fit's inside a training step's forward. Each rank would step with
    its own gradients, and under sharding the parameters there are temporary copies.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """``optimizers`` are the fit's, over parameters of ``module``."""
        self._module, self._optimizers = module, optimizers
        # A stack of forward passes (None) and of steps of the fit's optimizers inside them.
        self._inside: list[Optimizer | None] = []
        hooks = register_optimizer_step_pre_hook(self._begin_step), register_optimizer_step_post_hook(self._end_step)
        self._hooks = hooks

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def watch_forward(self) -> Generator[None, None, None]:
        """Check steps in this context, a training step's forward pass."""
        depth = len(self._inside)
        self._inside.append(None)
        try:
            yield
        finally:
            del self._inside[depth:]

    def _begin_step(self, optimizer: Optimizer, *call: object) -> None:
        if not self._inside or self._inside[-1] is not None:
            return  # A wrapping optimizer steps its inner one.
        if any(optimizer is own or optimizer in vars(own).values() for own in self._optimizers):
            self._inside.append(optimizer)
            return
        names = optimizer_remap.names_of(self._module)
        if found := [names[p] for group in optimizer.param_groups for p in group["params"] if p in names]:
            raise ConfigurationError(
                f"{type(optimizer).__qualname__}, which configure_optimizers does not return, steps {listed(found)} "
                "inside a training step. No engine reduces gradients there, and sharding engines have copies of "
                "parameters there. Return it from configure_optimizers and step it by manual optimization "
                "(automatic_optimization = False), or keep the values in a buffer, updated in forward."
            )

    def _end_step(self, optimizer: Optimizer, *call: object) -> None:
        if self._inside and self._inside[-1] is optimizer:
            self._inside.pop()


class SeenParameter(NamedTuple):
    """A parameter as forward sees it. ``own`` and ``kept`` are set if they are to be compared."""

    fqn: str
    parameter: Tensor
    own: Tensor | None = None  # This rank's shard of ``parameter``.
    kept: Tensor | None = None  # The shard or master that the engine keeps.
    released: bool = False  # Whether ``parameter`` is resharded, without values.


class ExternalWriteCheck:
    """Detects external writes in the first three steps of a fit. All ranks construct it and call its methods in order.

    Autograd's version counters show writes in place without a device sync, but not writes to ``parameter.data``. Those
    are found by a comparison of values, which synchronizes, or of a released parameter's storage.
    """

    STEPS = 3

    def __init__(
        self,
        strategy: str,
        see: Callable[[nn.Module | None], Iterable[SeenParameter]],
        units: Iterable[nn.Module] = (),
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """``see`` returns the parameters of one of ``units``, or all gathered ones. ``versions`` are their version
        counters when the fit begins. Units release their parameters in a hook after their forward.
        """
        self._strategy, self._see = strategy, see
        self._versions = dict(versions or {})
        self._written: set[str] = set()
        self._empty: dict[Tensor, Any] = {}  # The storages of released parameters.
        self._begins = False  # Whether no unit has run since all parameters were compared.
        self._steps = 0
        self.undo_stack = ExitStack()
        """Undone when the check ends."""
        for unit in units:
            # Before the engine's own hooks, which gather and release.
            for register, call in (
                (unit.register_forward_pre_hook, self._before_forward),
                (unit.register_forward_hook, self._after_forward),
            ):
                self.undo_stack.callback(register(partial(call, unit), prepend=True).remove)
        self.end_check = self.undo_stack.close

    def accept_own_writes(self) -> None:
        """Accept writes that the engine itself has made."""
        if self._steps < self.STEPS:
            for seen in self._see(None):
                self._versions[seen.fqn] = version(seen.parameter)
                if seen.released:
                    self.accept_own_release(seen.parameter)

    def accept_own_release(self, parameter: Tensor) -> None:
        """Accept that the engine itself has released a parameter."""
        self._empty[parameter] = parameter.untyped_storage()

    def end_step(self) -> None:
        self._steps += 1
        self.accept_own_writes()
        if self._steps == self.STEPS:
            self.end_check()

    def refuse_writes(self, *, together: bool) -> None:
        """Raise ConfigurationError if user code wrote to parameters. With ``together`` all ranks call it and raise."""
        if self._steps >= self.STEPS:
            return
        self._compare_parameters(None)
        self._begins = True
        found = Ranks.of().gather(self._written) if together else [self._written]
        if names := set[str]().union(*found):
            raise ConfigurationError(
                f"Written to by no optimizer (such as by clamp_, or through parameter.data): {listed(sorted(names))}. "
                f"Under {self._strategy} this is a copy of shards or masters, and the write is lost: {BETWEEN_STEPS}, "
                "or use shard_ddp in '32-true'."
            )

    def _before_forward(self, unit: nn.Module, *forward: Any) -> None:
        if self._begins:
            self._begins = False
            self._compare_parameters(None)  # Before a gather overwrites the step's own writes.

    def _after_forward(self, unit: nn.Module, *forward: Any) -> None:
        self._compare_parameters(unit)

    @torch.no_grad()
    def _compare_parameters(self, unit: nn.Module | None) -> None:
        compared: list[SeenParameter] = []
        for seen in self._see(unit):
            replaced = seen.released and self._empty.get(seen.parameter) is not seen.parameter.untyped_storage()
            if replaced or version(seen.parameter) != self._versions.get(seen.fqn, 0):
                self._written.add(seen.fqn)
            elif seen.own is not None and seen.own.numel():
                compared.append(seen)
        self._written.update(seen.fqn for seen, same in zip(compared, _equal_values(compared), strict=True) if not same)


def _equal_values(seen: Sequence[SeenParameter]) -> list[bool]:
    """Whether ``own`` and ``kept`` of each are equal, NaN included. It synchronizes a device once."""
    found = []
    for each in seen:
        assert each.own is not None
        assert each.kept is not None
        there = each.kept.to(each.own.device, non_blocking=True).to(each.own.dtype)
        found.append(((each.own == there) | (each.own.isnan() & there.isnan())).all())
    return torch.stack(found).tolist() if found else []


def check_gathered(strategy: str, root: nn.Module, names: Mapping[Tensor, str]) -> ExternalWriteCheck:
    """The check of the parameters that FSDP2's units under ``root`` gather. ``names``: FQNs of the shards."""
    units = units_of(root)

    def see(unit: Any) -> Iterator[SeenParameter]:
        for module in units if unit is None else [unit]:
            for shard, full, _ in gathered_parameters(module):
                yield SeenParameter(names[shard], full, own_part(full.detach(), shard), shard.to_local())

    # FSDP reuses the gathered tensors, and its own writes do not change their version counters.
    versions = {names[shard]: version(full) for unit in units for shard, full, _ in full_parameters(unit)}
    return ExternalWriteCheck(strategy, see, units, versions)
