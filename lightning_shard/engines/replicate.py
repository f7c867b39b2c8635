"""FSDP2 over a mesh with one shard: DDP with master weights and a reduction dtype, which torch's DDP lacks."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.fsdp2 import FSDP2Engine
from lightning_shard.engines.memory_model import FSDPFacts
from lightning_shard.engines.sharding import ApplyUnit, UnitOptions
from lightning_shard.engines.torch_ddp import DDPOptions
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.units import UnitRule, UnitSpec
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import SHARD


class Replicate(FSDP2Engine):
    """A full replica on every rank. Gradients are reduced unit by unit."""

    name = "ddp"
    strategy = "ShardDDPStrategy"

    def __init__(self, options: DDPOptions, forward: ForwardOptions, *, at_boundary: bool) -> None:
        """`check` refuses most ``options``."""
        # Without units for embeddings and heads, because a step may use their parameters outside their forward.
        auto: UnitSpec = [UnitRule(modules="auto")]
        unused = options.find_unused_parameters
        units = UnitOptions(units=auto, reshard_after_forward=False, find_unused_parameters=unused)
        super().__init__(options, forward, at_boundary=at_boundary, units=units)

    def check(self, run: PlannedRun) -> None:
        lacking = {name: value for name, value in self._options.changed().items() if name != "find_unused_parameters"}
        if lacking:
            shown = ", ".join(f"{name}: {getattr(value, '__name__', value)}" for name, value in lacking.items())
            fp32 = run.policy.compute == torch.float32
            reason = "frozen 16-bit parameters" if fp32 else f"precision {run.precision!r}"
            raise ConfigurationError(
                f"{shown} can't be used with {reason}, which runs on torch's FSDP2 with one shard instead of "
                "DistributedDataParallel. Remove it, or use precision '32-true'."
            )

    def memory_model(self, module: nn.Module, run: PlannedRun) -> FSDPFacts:
        # Parameters are gathered from forward to backward, into a copy even without a cast
        # (``FSDPParamGroup.wait_for_unshard``).
        at_boundary = self._at_boundary and run.ranks > 1
        return FSDPFacts(replicate=run.ranks, shard=1, reshard_after_forward=False, reduce_at_boundary=at_boundary)

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        # Again, because only now frozen 16-bit parameters are known.
        self.check(run.planned)
        return super().prepare(module, run)

    def _applier(self, run: Run) -> ApplyUnit:
        assert run.mesh[SHARD].size() == 1
        return partial(fully_shard, mesh=run.mesh)


def needs_replicate(root: nn.Module) -> bool:
    """Whether frozen 16-bit parameters have to be cast for the forward pass, which torch's DDP does not do."""
    return any(p.is_floating_point() and not p.requires_grad and p.itemsize < 4 for p in root.parameters())
