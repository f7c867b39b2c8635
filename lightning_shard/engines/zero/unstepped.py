"""Parameters that no rank uses in a step: torch's DDP leaves them, DeepSpeed steps them with gradients of zero."""

import hashlib
from collections.abc import Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.engines.usage import Usage
from lightning_shard.engines.whole_steps import Shard
from lightning_shard.engines.zero import layout
from lightning_shard.engines.zero.running import Running, replaced_step
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks
from lightning_shard.text import listed


class Unstepped:
    """All ranks make it and call its methods, in one order."""

    def __init__(
        self, running: Running, parameters: Mapping[str, Tensor], *, rests: bool, together: Set[str], always: bool
    ) -> None:
        """Look at a fit's trainable ``parameters``. ``rests``: gradients of zero change nothing, or are left out.
        ``together``: FQNs in leaf modules, which stage 3 reduces in full. ``always``: ranks compare each step.
        """
        self._parameters, self._rests, self._together = parameters, rests, together
        self.usage = Usage(parameters, always=always)
        self._unused: Set[str] = frozenset()
        self._keeps = False
        self._steps = 0
        self._closing = ExitStack()
        for fqn, parameter in parameters.items():
            self._closing.callback(self.usage.watch(fqn, parameter))
        # Sums over micro-batches that lie on the host go into the step with the gradient of the last one, and keep the
        # last step's where the first has none (``async_accumulate_grad_in_cpu_via_gpu``).
        self._first: Set[str] | None = None  # What the first micro-batch of this step has used.
        self._sums_on_host = layout.is_offloaded(running.zero)
        # Without it all gradients are reduced, zeros where there is none.
        self._compares = reduce = getattr(running.zero, "independent_gradient_partition_epilogue", None)
        if reduce:

            def reduce_equal() -> None:
                self.compare(ordered=running.stage > 1 or running.zero.overlap_comm)
                reduce()

            running.zero.independent_gradient_partition_epilogue = reduce_equal

    def after_micro_batch(self) -> None:
        """ConfigurationError: with the optimizer on the host, micro-batches of a step use different parameters."""
        now, self.usage.now = self.usage.now, set()
        self._first = now if self._first is None else self._first
        if self._sums_on_host and (other := self._first ^ now):
            raise ConfigurationError(
                f"Not all micro-batches of a step use {listed(sorted(other))}, but with the optimizer on the "
                "host DeepSpeed steps parameters with what the last micro-batch adds to their sums. Use "
                "shard_fsdp_offload, leave out offload_optimizer, or accumulate no gradients."
            )

    def finish(self, running: Running) -> None:
        """End a step whose gradients are reduced. ConfigurationError: ranks or steps use different parameters."""
        self._first = None
        before, self._unused = self._unused, self.usage.finish()
        if self._unused == self._parameters.keys():  # no backward pass has run: nothing is stepped
            self._unused = before
            return
        varies = self._steps > 0 and before != self._unused and not self._rests
        self._steps += 1
        if varies or not self.usage.partly - self._unused <= self._together:
            raise _differ(self.usage.partly | (before ^ self._unused if varies else frozenset()))
        if self._unused and not self._rests and not self._keeps:
            self._keep(running)

    def taken(self) -> Set[str]:
        """What backward passes have used since the last call, the same on all ranks, which compare it."""
        if not self._compares:
            self.compare(ordered=False)
        used = {*self.usage.used, *self._together}
        self.usage.used.clear()
        return used

    def compare(self, *, ordered: bool) -> None:
        """Compare what ranks used, ahead of a reduction that pairs it by its place, and, where it reduces gradients as
        they come, in which order. ConfigurationError: they differ.
        """
        if self.usage.settled:
            return
        came = [fqn for fqn in self.usage.used if fqn not in self._together]
        own, ranks = came if ordered else sorted(came), Ranks.of()
        digests = ranks.gather(hashlib.sha256(repr(own).encode()).digest())  # In place of thousands of names.
        other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
        if other is None:
            return
        orders = ranks.gather(own)
        if partly := set().union(*orders).difference(set(orders[0]).intersection(*orders)):
            raise _differ(partly)
        first, there = next(pair for pair in zip(orders[0], orders[other], strict=True) if pair[0] != pair[1])
        raise ConfigurationError(
            f"Gradients come in different orders: where rank 0 has that of {first}, rank {other} has that of {there}. "
            "Stages 2 and 3, and stage 1 with overlap_comm, reduce them as they come. Run the modules in one order on "
            "every rank, or use shard_ddp."
        )

    def _keep(self, running: Running) -> None:
        """Put the masters of what is never used back after each step, before DeepSpeed copies them."""
        assert running.optimizer is not None
        if any(group.new_slot is not None for group in running.groups):
            raise ConfigurationError(
                f"No step uses {listed(sorted(self._unused))}, but with the optimizer offloaded to NVMe DeepSpeed "
                "steps them, weight decay and all. Freeze them (requires_grad_(False))."
            )
        parts = [part for member, part in layout.shards(running.groups) if member.fqn in self._unused]
        self._keeps, own = True, running.optimizer.step

        @torch.no_grad()
        def step(*args: Any, **kwargs: Any) -> Any:
            before = [part.clone() for part in parts]
            result = own(*args, **kwargs)
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
            return result

        self._closing.enter_context(replaced_step(running.optimizer, step))

    def with_gradients(self, shard: Shard) -> Shard:
        """``shard`` without the gradient of zeros where no rank used it."""
        return replace(shard, gradient=lambda: None if shard.fqn in self._unused else shard.gradient())

    def close(self) -> None:
        self._closing.close()


def _differ(names: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        "Ranks, or steps, use different parameters, but DeepSpeed steps them together, as flat partitions with one "
        f"count of steps. In this one not all use: {listed(sorted(names))}. Use shard_fsdp, or shard_ddp with "
        "find_unused_parameters: true."
    )
