"""Check that all ranks use the same modules and parameters in each step, before they meet in another collective.

If ranks use different parameters, engines that gather or reduce several at once pair wrong ones, or hang. Under DDP
with ``find_unused_parameters`` a parameter that no rank used has no gradient and is not stepped. A parameter that some
ranks used has the average with zeros of the others. Every engine does the same or refuses.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_shard.engines.module_checks import different_branches, other_parameters
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.text import listed

T = TypeVar("T")

_STEPS = 3
"""The number of first steps in which ranks compare their parameters. Later steps must use the same ones."""

_WAIT = timedelta(seconds=20)
"""How long a rank in a new branch waits for the others, which may wait in a gather of another branch."""

_TIMES = 64
"""The number of calls of one module in a step that are distinguished."""

_PLAIN = torch.empty(0)  # Its ``requires_grad_`` raises inside a transform of torch.func.

TRAINING = "training"
_END = "the end of the step's forward"


class ParameterUse:
    """Compares the modules that each forward runs, and the parameters that each backward reaches, between ranks.

    A steady step communicates nothing: the order of modules and the parameters are compared with the first steps'. If
    modules came in two orders before, ranks compare a digest.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]] = (), once: Iterable[tuple[str, nn.Module]] = ()) -> None:
        """Hook the named ``units``, which all ranks gather together, and in the first steps the modules ``once``, which
        stay gathered. All ranks construct it and call its methods in order.
        """
        self._ranks = Ranks.of()
        # By kind of step, module and its count of calls, the modules that followed on all ranks.
        self._successors: dict[tuple[str, str, int], list[str]] = {}
        self._position: tuple[str, str, int] | None = None  # The present key of `_successors`.
        self._times: dict[str, int] = {}
        self._forwards = 0
        self._units = dict(units)
        # Before the engine's own hooks, which gather.
        self._hooks = [
            m.register_forward_pre_hook(partial(self._enter, n), prepend=True) for n, m in self._units.items()
        ]
        self._first_hooks = [
            module.register_forward_pre_hook(lambda *call, fqn=fqn: _refuse_transforms(fqn), prepend=True)
            for fqn, module in once
        ]
        self.compare_parameters(())

    def compare_parameters(
        self, names: Iterable[str], *, always: bool = False, always_reduced: Set[str] = frozenset()
    ) -> None:
        """Compare the use of trainable parameters with the FQNs ``names`` from now on, in every step if ``always``.
        ``always_reduced``: parameters that are reduced in every pass.
        """
        self.names, self._always_reduced, self._steps = dict.fromkeys(names), always_reduced, 0
        # Whether ranks or steps use different parameters. Equal on every rank. A single rank need not be steady.
        self._varies = always or self._ranks.size == 1
        self._unused: tuple[Set[str], Set[str]] | None = None  # In the last step, by all ranks and by at least one.
        self._last_passes: list[list[str]] = []  # Used by each backward pass of the last step.
        self.used_in_step: dict[str, None] = {}  # Used by this step, on this rank.
        self.used_in_pass: dict[str, None] = {}  # Used by this backward pass, in order, without ``always_reduced``.
        self.begin_step()

    def begin_step(self) -> None:
        """Clear the parameters that backward passes have used so far."""
        self.used_in_step.clear()
        self._passes_so_far: list[list[str]] = []  # Used by each backward pass of this step.

    # Modules

    @contextmanager
    def watch_forward(self, kind: str) -> Generator[None, None, None]:
        """A forward pass, of training or of another ``kind``. All ranks run it."""
        if not self._units:
            yield
            return
        self._position = kind, "", 1
        self._times.clear()
        try:
            yield
            self._check_next_module(_END)
        finally:
            self._position = None
        self._forwards += 1
        while self._forwards >= _STEPS and self._first_hooks:
            self._first_hooks.pop().remove()

    def _enter(self, called: str, *call: Any) -> None:
        _refuse_transforms(called)
        if self._position is not None and not torch.compiler.is_compiling():
            self._check_next_module(called)

    def _check_next_module(self, called: str) -> None:
        assert self._position is not None
        known = self._successors.setdefault(self._position, [])
        if known != [called] and self._ranks.size > 1:
            self._agree_on_module(called, known)
        times = self._times[called] = self._times.get(called, 0) + 1
        self._position = self._position[0], called, min(times, _TIMES)

    def _agree_on_module(self, called: str, known: list[str]) -> None:
        """Compare the next module with other ranks', unless it is the only one that came here before. Ranks that run
        the ``known`` one do not take part, so a new one waits for them with a timeout.
        """
        lone = len(known) == 1
        if lone and (late := self._late_change(called, known[0])) is not None:
            raise other_parameters(
                f"This step {_runs(called)} where each step before {_runs(known[0])}: other parameters than the first "
                f"{_STEPS}, in {late or 'the module itself'}"
            )
        try:
            self._gather_if_different(_runs(called), called, _WAIT if lone else None)
        except RuntimeError as error:
            if not lone or isinstance(error, ConfigurationError):
                raise
            raise different_branches(
                f"rank {self._ranks.rank} {_runs(called)}, where each step before {_runs(known[0])}, and other ranks "
                f"do not in {_WAIT.seconds} s"
            ) from error
        if called not in known:
            known.append(called)

    def _gather_if_different(self, where: str, own: T, timeout: timedelta | None = None) -> list[T]:
        """Every rank's ``own`` value, gathered if a digest differs. DifferentUse: ranks call it for different
        ``where``.
        """
        digest = hashlib.sha256(repr((where, own)).encode()).digest()[:16]
        if self._ranks.same(digest, timeout):
            return [own]
        there = self._ranks.gather((where, own))
        if rank := next((rank for rank, (other, _) in enumerate(there) if other != there[0][0]), 0):
            raise different_branches(f"rank 0 {there[0][0]}, rank {rank} {there[rank][0]}")
        return [value for _, value in there]

    def _late_change(self, called: str, expected: str) -> str | None:
        """The first new or missing module of a step, if it has trainable parameters whose use is steady."""
        if not (self.is_steady and self._position is not None and self._position[0] == TRAINING):
            return None
        before = any(called in known for known in self._successors.values())
        unit = expected if before else called
        trained = any(p.requires_grad for p in self._units[unit].parameters()) if unit in self._units else False
        return unit if trained else None

    # Parameters

    def watch_parameter(self, fqn: str, parameter: Tensor, *, ordered: bool) -> Callable[[], None]:
        """Record backward passes that reach ``parameter``. Returns the undo. ``ordered``: gradients are reduced as they
        come, so a steady step must have the order of the first ones (ConfigurationError in backward).
        """

        def note(gradient: Tensor) -> None:
            self.used_in_step[fqn] = None
            if fqn in self._always_reduced or fqn in self.used_in_pass:
                return
            self.used_in_pass[fqn] = None
            if ordered and self.is_steady and len(self._passes_so_far) < len(self._last_passes):
                before, place = self._last_passes[len(self._passes_so_far)], len(self.used_in_pass) - 1
                if before[place : place + 1] != [fqn]:
                    raise self._changed({fqn} if fqn not in before else set(before[place : place + 1]))

        handle: Any = parameter.register_hook(note)
        return lambda: handle.remove()

    @property
    def is_steady(self) -> bool:
        """Whether all ranks used the same parameters in each of the first steps."""
        return self._steps >= _STEPS and not self._varies

    @property
    def partly_unused(self) -> Set[str]:
        """The parameters that some rank did not use in the last compared step."""
        return self._unused[1] if self._unused else frozenset()

    def before_reduction(self, own: list[str], *, repeats: bool) -> tuple[Set[str], list[list[str]]]:
        """Compare this rank's gradients, in order, before a reduction that pairs them by position. Returns the FQNs
        with a gradient on only some ranks and, if there are none but orders differ, each rank's order. ``repeats``:
        each step has the same passes, or a steady step raises ConfigurationError.
        """
        index = len(self._passes_so_far)
        self._passes_so_far.append(own)
        if self.is_steady:
            if repeats and index < len(self._last_passes) and own != self._last_passes[index]:
                raise self._changed(set(own).symmetric_difference(self._last_passes[index]))
            return frozenset(), []
        orders = self._gather_if_different("reduces gradients", own)
        partly = set[str]().union(*orders) - set(orders[0]).intersection(*orders)
        return partly, [] if len(orders) == 1 or partly else orders

    def finish_step(self) -> Set[str]:
        """End a step and return the names that no rank used. All ranks call it, and communicate in the first steps or
        if steps vary. ConfigurationError: a steady step used other parameters than the first ones.
        """
        here, passes = self.names.keys() - self.used_in_step.keys(), self._passes_so_far
        self.begin_step()
        if self.is_steady:
            assert self._unused is not None
            # A step without a backward pass steps nothing.
            if here != self._unused[0] and len(here) < len(self.names):
                raise self._changed(here ^ self._unused[0])
            return here
        if passes and not self._always_reduced:  # `before_reduction` found the same parameters on all ranks
            unused = frozenset(here), frozenset(here)
        else:
            gathered = self._gather_if_different("is at the end of the step", sorted(here))
            everywhere = [frozenset(each) for each in gathered]
            unused = frozenset.intersection(*everywhere), frozenset[str]().union(*everywhere)
        steady = passes[: len(self._last_passes)] == self._last_passes[: len(passes)]
        self._varies |= unused[0] != unused[1] or (self._unused is not None and (unused != self._unused or not steady))
        self._unused, self._last_passes = unused, max(self._last_passes, passes, key=len)
        self._steps += 1
        return unused[0]

    def _changed(self, fqns: Set[str]) -> ConfigurationError:
        which = listed(sorted(fqns)) if fqns else "the same ones in another order"
        return other_parameters(f"This step uses other parameters than the first {_STEPS}: {which}")

    def remove_hooks(self) -> None:
        """Take the hooks off the modules."""
        for hooks in (self._hooks, self._first_hooks):
            while hooks:
                hooks.pop().remove()


def _runs(called: str) -> str:
    return f"is at {_END}" if called == _END else f"runs {called or 'the module itself'}"


def _refuse_transforms(called: str) -> None:
    try:
        _PLAIN.requires_grad_(False)
    except RuntimeError:  # Tensors that are gathered inside a transform are gone after it.
        raise ConfigurationError(
            f"A transform of torch.func (vmap, grad, jacrev, jvp, ...) {_runs(called)}, whose parameters have to be "
            "gathered first, which can't be done inside. Use torch.autograd.grad or torch.autograd.functional, or "
            "shard_ddp in '32-true' or shard_deepspeed_stage_2, which gather nothing."
        ) from None
