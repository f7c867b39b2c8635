"""Which parameters a step uses, agreed between ranks, so that every engine steps those that torch's DDP steps.

Under DDP with ``find_unused_parameters`` a parameter that no rank used has no gradient and is not stepped; one that
some ranks used has the average with zeros of the others. Engines that gather or reduce several parameters at once pair
the wrong ones where ranks use different ones, without an error as long as the sizes fit.

And which are frozen, thawed or made once an engine has prepared a module (`Freezing`).
"""

from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.engines._fsdp2 import begin_sums, gathered_parameters, gathered_tensors, units_of
from lightning_shard.engines.refusals import different_branches
from lightning_shard.errors import ConfigurationError, WrappingError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import parameter_names
from lightning_shard.text import listed

_COMPARED = 3
"""Steps in which ranks tell each other what they used. Later ones must use the same, or be told of always."""


_PLAIN = torch.empty(0)  # Which transforms of torch.func let nobody say of whether it requires a gradient.


class Usage:
    """The parameters that take part in each step."""

    def __init__(self, names: Iterable[str], *, always: bool = False) -> None:
        """Begin to look at ``names``; with ``always`` ranks tell each other in every step, which waits for all."""
        self._names = frozenset(names)
        self.used: dict[str, None] = {}  # What this rank has used in this step, in the order in which gradients came.
        self.now: set[str] = set()  # What has a gradient since somebody emptied this.
        self.watched: set[str] = set()  # Of which it is known whether a step uses them.
        self._steps = 0
        self._last: list[Set[str]] = []
        self.varies = always  # Whether ranks, or steps, differ in what they use, the same on every rank.
        self.differs = False  # Whether ranks do.
        self.partly: Set[str] = frozenset()  # What some rank did not use in the last step that ranks told of.

    def watch(self, fqn: str, parameter: Tensor) -> Callable[[], None]:
        """Note the backward passes that reach ``parameter``; returns what ends that."""

        def note(gradient: Tensor) -> None:
            self.used[fqn] = None
            self.now.add(fqn)

        self.watched.add(fqn)
        handle: Any = parameter.register_hook(note)
        return lambda: handle.remove()

    @property
    def settled(self) -> bool:
        """Whether all ranks are known to use the same parameters in each step."""
        return self._steps >= _COMPARED and not self.varies

    @property
    def never(self) -> Set[str]:
        """What is known to be used in no step."""
        return self._last[0] if self.settled else frozenset()

    def finish(self, used: Iterable[str] = ()) -> Set[str]:
        """End a step; returns what of ``used``, or of what was noted, no rank used. All ranks call it, and communicate
        in the first ones and where `varies`. ConfigurationError: it uses others than the first ones, which were the
        same.
        """
        here = self._names.difference(self.used, used)
        self.used.clear()
        if self.settled:
            if here not in (self._last[0], self._names):  # of which one had no backward pass
                changed = listed(sorted(here ^ self._last[0]))
                raise ConfigurationError(
                    f"This step uses other parameters than the first {_COMPARED}: {changed}. Ranks have to tell each "
                    "other what they use then: set find_unused_parameters: true (ShardFSDPStrategy, ShardDDPStrategy)."
                )
            return here
        everywhere: list[Set[str]] = Ranks.of().gather(here)
        self._steps += 1
        self.differs |= any(each != everywhere[0] for each in everywhere)
        self.varies |= self.differs or bool(self._last and everywhere != self._last)
        self._last, self.partly = everywhere, frozenset().union(*everywhere)
        return frozenset.intersection(*map(frozenset, everywhere))


class SameUnits:
    """Refuses ranks that run different modules, each of which is gathered by all ranks together, or in transforms."""

    def __init__(self, units: Iterable[tuple[str, Any]], once: Iterable[tuple[str, Any]] = ()) -> None:
        """Look at the first steps of these modules, of which names are given; those of ``once`` stay gathered."""
        self._inside, self._steps = False, 0
        # Before the engine's own hooks, which gather.
        self._hooks = [
            module.register_forward_pre_hook(partial(look, fqn or "the module itself"), prepend=True)
            for look, modules in ((self._enter, units), (self._refuse_transforms, once))
            for fqn, module in modules
        ]

    def _enter(self, called: str, *args: Any) -> None:
        self._refuse_transforms(called)
        if self._inside and not torch.compiler.is_compiling():
            self._meet(f"runs {called}")

    def _refuse_transforms(self, called: str, *args: Any) -> None:
        try:
            _PLAIN.requires_grad_(False)
        except RuntimeError:  # What is gathered in a transform belongs to it, and is gone after it.
            raise ConfigurationError(
                f"A transform of torch.func (vmap, grad, jacrev, jvp, ...) runs {called}, whose parameters have to be "
                "gathered first, which can't be done inside. Use torch.autograd.grad or torch.autograd.functional, or "
                "shard_ddp in '32-true' or shard_deepspeed_stage_2, which gather nothing."
            ) from None

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """A forward pass. All ranks run it."""
        if not self._hooks:
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._meet("is at the end of the step's forward")
        self._steps += 1
        if self._steps == _COMPARED:
            self.close()

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _meet(self, where: str) -> None:
        everywhere = Ranks.of().gather(where)
        if other := [rank for rank, each in enumerate(everywhere) if each != everywhere[0]]:
            raise different_branches(f"rank 0 {everywhere[0]}, rank {other[0]} {everywhere[other[0]]}")


class UnitUsage:
    """`Usage` of a module whose units reduce zeros for unused parameters as long as ranks may differ in them."""

    def __init__(self, root: nn.Module, *, always: bool, compiled: bool) -> None:
        """Begin to look at the steps of ``root``, which is sharded; its trainable parameters count. ``always``: ranks
        compare in every step. ``compiled``: units have no hooks at parameters; those with a gradient are used.
        """
        self._names = {p: fqn for p, fqn in parameter_names(root).items() if p.requires_grad}
        self.usage = Usage(self._names.values(), always=always)
        self._root = root
        self._undo: list[Callable[[], None]] = []
        self._reached: set[str] = set()
        self._reduces_zeros = False
        if compiled and not always:
            return
        # Full parameters are there once a unit has run; before FSDP's own hooks, which free them.
        self._undo += [unit.register_forward_hook(self.watch, prepend=True).remove for unit in units_of(root)]
        full = [(fqn, parameter) for parameter, fqn in self._names.items() if not isinstance(parameter, DTensor)]
        self._undo += [self.usage.watch(*each) for each in full]
        self._reduce_zeros(True)

    def _reduce_zeros(self, enabled: bool) -> None:
        for unit in units_of(self._root):
            unit.set_reduce_scatter_unused_params(enabled, recurse=False)
        self._reduces_zeros = enabled

    def watch(self, unit: Any, *arguments: Any) -> None:
        """Look at the parameters of ``unit``, which is gathered; the root's step ends without a hook."""
        for shard, full, _ in gathered_parameters(unit) if self._undo else ():
            fqn = self._names.get(shard)
            if fqn is not None and full.requires_grad and fqn not in self.usage.watched:
                self._undo.append(self.usage.watch(fqn, full))

    def after_backward(self) -> None:
        """Note which parameters have a gradient, ahead of the user's hooks, which may drop it."""
        self._reached |= {fqn for parameter, fqn in self._names.items() if parameter.grad is not None}

    def after_micro_batch(self) -> None:
        """Between two micro-batches whose gradients are reduced once: the next one may use what this one did not."""
        never = self.usage.never
        begin_sums(self._root, {parameter for parameter, fqn in self._names.items() if fqn not in never})

    def finish(self) -> None:
        """End a step whose gradients are reduced: those that no rank used are None. All ranks call it. WrappingError:
        ranks use different parameters, and units are compiled.
        """
        # Units that run by another method than forward are not seen.
        self.after_backward()
        unused = self.usage.finish(self._reached - self.usage.watched)
        self._reached.clear()
        if self.usage.differs and not self._reduces_zeros:
            raise WrappingError(
                "Ranks use different parameters in a step, whose gradients compiled units can't reduce. Set compile: "
                "false, or use shard_ddp with find_unused_parameters: true."
            )
        for parameter, fqn in self._names.items():
            if fqn in unused:
                parameter.grad = None
        if self.usage.settled:
            self.close()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.usage.watched.clear()
        if self._reduces_zeros:
            self._reduce_zeros(False)


class Freezing:
    """What was trainable at the last look."""

    def __init__(self, module: nn.Module, *, frozen_too: bool, named: bool) -> None:
        """Look at ``module`` as its engine is about to train it; ``frozen_too``: that gathers frozen parameters;
        ``named``: that knows what it steps by name.
        """
        self._module, self._frozen_too, self._looks, self._stepped = module, frozen_too, 0, False
        self._parameters = list(module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        self._names = parameter_names(module) if named else {}

    def refuse_new(self) -> None:
        """Refuse parameters (ConfigurationError) that came since and are no gathered ones of a unit, and new names."""
        known: set[Tensor] = {*self._parameters, *gathered_tensors(self._module)}
        found = parameter_names(self._module).items()
        if new := [n for p, n in found if p not in known and (self._frozen_too or p.requires_grad)]:
            raise ConfigurationError(
                f"{listed(new)} came after the model was set up to train, in a hook or a step of the fit: "
                "no engine reduces their gradients or shards them, and no optimizer has them. Make them in "
                "configure_model, setup or __init__."
            )
        if renamed := [f"{self._names[p]} ({n} now)" for p, n in found if n != self._names.get(p, n)]:
            raise ConfigurationError(
                f"{listed(renamed)} got other names after the model was set up to train, as torch.nn.utils.prune gives "
                "in a hook of the fit, but are stepped and saved by name. Prune in configure_model, setup or __init__, "
                "or use shard_ddp in '32-true'."
            )

    def changed(self, batch_idx: int) -> bool:
        """Whether other parameters are trainable than at the last look; ConfigurationError as `refuse_new`."""
        if batch_idx == 0 or self._looks < 2:  # at what hooks made, and the first step
            self.refuse_new()
            self._looks += 1
        before, self._trainable = self._trainable, [p.requires_grad for p in self._parameters]
        return self._trainable != before

    def after_forward(self) -> None:
        """Refuse, as `refuse_new`, what the first step made, ahead of its backward."""
        if not self._stepped:
            self.refuse_new()
        self._stepped = True

    def refuse_without_masters(self, master: torch.dtype) -> None:
        """ConfigurationError: a thawed parameter has no ``master`` weights: it was loaded in 16 bits and frozen."""
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype not in (master, torch.float64)]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or let the fit begin with them trainable."
            )
