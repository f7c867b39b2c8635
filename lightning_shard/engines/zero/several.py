"""Several optimizers over the masters of one DeepSpeed engine, which steps one.

DeepSpeed is given an optimizer that steps nothing, over the parameters of all. What it reduces is taken out of it at an
accumulation boundary and kept by parameter, as ``parameter.grad`` is; the user's optimizers step full parameters at
their owners (`WholeSteps`), and DeepSpeed then casts and gathers what they wrote.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from lightning_shard.engines.zero.running import Running
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import FlatSlice, FlatTensor


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


class SeveralOptimizers:
    """All ranks make it and call its methods, in one order."""

    def __init__(
        self,
        started: Running,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Give each of the user's ``optimizers`` its shards; ``group`` are the ranks that shard the parameters.

        DeepSpeed was ``started`` over a `Carrier` of them, with stages 1 to 3.
        """
        self._running = started
        self._held: dict[str, Tensor] = {}
        """FQN to this rank's shard of a reduced gradient, until its optimizer's ``zero_grad``."""
        self._members = {m.fqn: m for flat in started.groups for m in flat.members if m.stepped}
        self._closing = ExitStack()
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
            self._closing.callback(vars(optimizer).pop, "zero_grad")

    def whole(self, optimizer: Optimizer) -> WholeSteps:
        return self._whole[optimizer]

    def all(self) -> Iterable[WholeSteps]:
        return self._whole.values()

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients of the backward passes so far out of DeepSpeed, which then has none."""
        if not self._running.pending:
            return
        running.finish_accumulation(self._running)
        for shard in layout.steps(self._running.zero, self._running.groups):
            if (gradient := shard.gradient()) is not None:
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

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step one optimizer; forward sees the new values."""
        self.collect()
        self.whole(optimizer).step(**kwargs)
        running.refresh(self._running)

    def close(self) -> None:
        self._closing.close()
