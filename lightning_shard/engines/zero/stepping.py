"""Stepping the masters of a DeepSpeed engine with one optimizer, or with several.

One is stepped by DeepSpeed, on flat partitions, or ahead of it on full parameters. For several DeepSpeed is given an
optimizer that steps nothing, over all parameters. What it reduces is taken out of it at an accumulation boundary; the
user's optimizers step full parameters at their owners (`WholeSteps`), and DeepSpeed casts and gathers what they wrote.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_shard.engines.whole_steps import WholeSteps
from lightning_shard.engines.zero import layout, running
from lightning_shard.engines.zero.gradients import SteppedOnce
from lightning_shard.engines.zero.running import Running
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, FlatSlice, FlatTensor


class Carrier(SGD):
    """Has the parameters of several optimizers, group by group, and steps nothing."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the parameters of ``optimizers``; ConfigurationError: one is in two of them."""
        groups = [{"params": list(group["params"])} for optimizer in optimizers for group in optimizer.param_groups]
        given = [id(parameter) for group in groups for parameter in group["params"]]
        if len(set(given)) < len(given):
            raise ConfigurationError(
                "configure_optimizers returns optimizers that share parameters, whose gradients and state ZeRO keeps "
                "once. Give each parameter to one optimizer, or use shard_fsdp."
            )
        super().__init__(groups, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the values are there before DeepSpeed casts and gathers them."""


class OneOptimizer:
    """All ranks make it and call its methods, in one order."""

    def __init__(self, started: Running, whole: WholeSteps | None) -> None:
        """``whole`` steps the optimizer of ``started`` on full parameters; None: DeepSpeed does on flat partitions."""
        self._running, self._whole = started, whole
        self._once = SteppedOnce(set(layout.masters(started.groups)), lambda: started.pending)
        self.drop, self.check = self._once.drop, self._once.check
        closing = ExitStack()
        self.close = closing.close
        if started.groups:
            vars(started.optimizer)["zero_grad"] = self._once.drop_all
            closing.callback(vars(started.optimizer).pop, "zero_grad")

    def optimizers(self) -> Sequence[AnyOptimizer]:
        assert self._running.optimizer is not None
        flat = FlatOptimizer(optimizer=self._running.optimizer, groups=self._running.groups)
        return [flat if self._whole is None else self._whole.owned()]

    def stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        if self._whole is not None:
            return self._whole.stepped()
        return [(m.fqn, group.flat) for group in self._running.groups for m in group.members if m.stepped]

    def gradient(self, fqn: str) -> FlatTensor | None:
        return layout.gradient_of(self._running.zero, self._running.groups, fqn) if self._running.pending else None

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return layout.reduced_gradients(self._running.zero) if self._running.pending else []

    def collect(self) -> None:
        """At an accumulation boundary: complete what backward did not reduce."""
        running.finish_accumulation(self._running)

    def step(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        self.check()
        self._once.step()
        if self._whole is not None and self._running.pending and not skip:
            self._whole.step(**kwargs)
        running.step(self._running, skip=skip)

    def share_state(self) -> None:
        if self._whole is not None:
            self._whole.share_state()


class SeveralOptimizers:
    """All ranks make it and call its methods, in one order."""

    def __init__(
        self,
        started: Running,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
        *,
        taken: Callable[[], Set[str]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Give each of the user's ``optimizers`` its shards over ``group``. DeepSpeed was ``started`` over a `Carrier`,
        with stages 1 to 3. ``taken``: FQNs used in backward since its last call.
        """
        self._running, self._taken = started, taken
        self._held: dict[str, Tensor] = {}
        """FQN to this rank's shard of a reduced gradient, until its optimizer's ``zero_grad``."""
        self._members = {m.fqn: m for flat in started.groups for m in flat.members if m.stepped}
        closing = ExitStack()
        self.close = closing.close
        shards = {shard.fqn: shard for shard in layout.steps(started.zero, started.groups)}
        self._whole: dict[Optimizer, WholeSteps] = {}
        self._own: dict[Optimizer, list[str]] = {}
        for optimizer in optimizers:
            own = [
                replace(shards[fqn], group=settings, tensor=parameter, gradient=partial(self._held.get, fqn))
                for settings in optimizer.param_groups
                for parameter in settings["params"]
                if (fqn := names[parameter]) in shards
            ]
            self._own[optimizer] = [shard.fqn for shard in own]
            self._whole[optimizer] = WholeSteps(optimizer, own, step=optimizer.step, group=group, device=device)
            vars(optimizer)["zero_grad"] = partial(self._zero_grad, optimizer)
            closing.callback(vars(optimizer).pop, "zero_grad")

    def optimizers(self) -> Sequence[AnyOptimizer]:
        return [whole.owned() for whole in self._whole.values()]

    def stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        return self._whole[optimizer].stepped()

    def check(self) -> None:
        """Nothing: gradients are kept until they are dropped, as torch keeps them."""

    def share_state(self) -> None:
        for whole in self._whole.values():
            whole.share_state()

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients of the backward passes so far out of DeepSpeed, which then has none."""
        if not self._running.pending:
            return
        running.finish_accumulation(self._running)
        used = self._taken()
        for shard in layout.steps(self._running.zero, self._running.groups):
            if shard.fqn in used and (gradient := shard.gradient()) is not None:
                held = self._held.get(shard.fqn)
                # The zeros of a group without any gradient are in the compute dtype in stage 3.
                gradient = gradient.to(shard.value().dtype, copy=held is None)
                self._held[shard.fqn] = gradient if held is None else held.add_(gradient)
        running.step(self._running, skip=True)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        for fqn in self._own[optimizer]:
            self.drop(fqn)

    def drop(self, fqn: str) -> None:
        self.collect()
        self._held.pop(fqn, None)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [self._held[fqn] for fqn in self._own[optimizer] if fqn in self._held]

    def gradient(self, fqn: str) -> FlatTensor | None:
        if fqn not in self._held:
            return None
        member, held = self._members[fqn], self._held[fqn]
        return FlatTensor(member.shape, held.dtype, [FlatSlice(data=held, start=member.start)])

    def step(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        """Step one optimizer; forward sees the new values."""
        if skip:
            return
        self.collect()
        self._whole[optimizer].step(**kwargs)
        running.refresh(self._running)


Stepping = OneOptimizer | SeveralOptimizers
