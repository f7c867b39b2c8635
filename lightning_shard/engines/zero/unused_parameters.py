"""Parameters that a step does not use: DeepSpeed would step them with gradients of zero."""

from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lightning_shard.engines.owner_steps import Shard
from lightning_shard.engines.parameter_use import ParameterUse
from lightning_shard.engines.zero import flat_layout
from lightning_shard.engines.zero.running_engine import RunningEngine, replaced_step
from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import wrap
from lightning_shard.text import listed


class UnusedParameters:
    """Keeps the values of parameters that no rank uses in a step, as torch's DDP does. Those that some ranks use are
    refused. All ranks make it and call its methods, in one order.
    """

    def __init__(
        self, use: ParameterUse, running: RunningEngine, *, rests: bool, apart: Set[str], automatic: bool
    ) -> None:
        """Compare the ``use`` of parameters ahead of each reduction of ``running``. ``rests``: gradients of zero change
        nothing, or are left out. ``apart``: FQNs that stage 3 reduces in full. ``automatic``: in automatic optimization
        all steps have the same backward passes.
        """
        self._use, self._running, self._rests, self._apart, self.automatic = use, running, rests, apart, automatic
        self._unused: Set[str] = frozenset()
        self._steps, self._keeps, self.closing = 0, False, ExitStack()
        # In sums on the host the step uses the gradient of the last micro-batch, and the last step's sum stays if the
        # first micro-batch has none (``async_accumulate_grad_in_cpu_via_gpu``).
        self._first: Set[str] | None = None  # The parameters that the first micro-batch of this step used.
        self._sums_on_host = flat_layout.steps_on_host(running.zero)
        name = "reduce_gradients" if running.stage == 1 else "independent_gradient_partition_epilogue"
        # ``BF16_Optimizer`` has neither. It reduces all gradients, with zeros for missing ones.
        self._compares = hasattr(running.zero, name)
        if self._compares:
            wrap(running.zero, name, self._reduce_equal)

    def _reduce_equal(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._compare(ordered=self._running.stage > 1 or self._running.zero.overlap_comm)
        return reduce(*args, **kwargs)

    def _compare(self, *, ordered: bool) -> None:
        use = self._use
        own = list(use.used_in_pass) if ordered else sorted(use.used_in_step.keys() - self._apart)
        partly, orders = use.before_reduction(own, repeats=self.automatic)
        if partly:
            raise _differ(partly)
        if orders:
            rank, order = next((rank, order) for rank, order in enumerate(orders) if order != orders[0])
            first, there = next(pair for pair in zip(orders[0], order, strict=True) if pair[0] != pair[1])
            raise ConfigurationError(
                f"Gradients come in different orders: rank 0 has {first} at a place, and rank {rank} {there}, but "
                "DeepSpeed reduces them as they come. Run the modules in one order on every rank, or use shard_ddp."
            )

    def after_backward(self) -> None:
        """ConfigurationError: with the optimizer on the host, micro-batches of a step use different parameters."""
        if not self.automatic:
            return
        came = frozenset(self._use.used_in_pass)
        self._first = came if self._first is None else self._first
        if self._sums_on_host and (other := self._first ^ came):
            raise ConfigurationError(
                f"Not all micro-batches of a step use {listed(sorted(other))}, but with the optimizer on the "
                "host DeepSpeed steps parameters with the last micro-batch's addition to their sums. Use "
                "shard_fsdp_offload, leave out offload_optimizer, or accumulate no gradients."
            )

    def end_step(self) -> None:
        """End a step with reduced gradients. ConfigurationError: ranks or steps use different parameters."""
        self._first = None
        before, unused = self._unused, self._use.finish_step()
        if len(unused) == len(self._use.names):  # No backward pass has run, and nothing is stepped.
            return
        varies = self._steps > 0 and before != unused and not self._rests
        self._unused, self._steps = unused, self._steps + 1
        if varies or not self._use.partly_unused - unused <= self._apart:
            raise _differ(self._use.partly_unused | (before ^ unused if varies else frozenset()))
        if unused and not self._rests and not self._keeps:
            self._keep()

    def take_used(self) -> Set[str]:
        """FQNs that backward passes have used since the last call. All ranks compare them, and get the same."""
        if not self._compares:
            self._compare(ordered=False)
        used = {*self._use.used_in_step, *self._apart}
        self._use.begin_step()
        return used

    def _keep(self) -> None:
        """Restore the masters of unused parameters after each step, before DeepSpeed copies them."""
        running = self._running
        assert running.optimizer is not None
        if any(group.new_slot is not None for group in running.groups):
            raise ConfigurationError(
                f"No step uses {listed(sorted(self._unused))}, but with the optimizer offloaded to NVMe DeepSpeed "
                "steps them, weight decay and all. Freeze them (requires_grad_(False))."
            )
        parts = [part for member, part in flat_layout.master_slices(running.groups) if member.fqn in self._unused]
        self._keeps, own = True, running.optimizer.step

        @torch.no_grad()
        def step_but_unused(*args: Any, **kwargs: Any) -> Any:
            before = [part.clone() for part in parts]
            result = own(*args, **kwargs)
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
            return result

        self.closing.enter_context(replaced_step(running.optimizer, step_but_unused))

    def with_gradient(self, shard: Shard) -> Shard:
        """``shard`` without the gradient of zeros of an unused parameter."""
        return replace(shard, gradient=lambda: None if shard.fqn in self._unused else shard.gradient())


def _differ(names: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        "Ranks, or steps, use different parameters, but DeepSpeed steps them together, as flat partitions with one "
        f"count of steps. In this one not all use: {listed(sorted(names))}. Use shard_fsdp, or shard_ddp with "
        "find_unused_parameters: true."
    )
