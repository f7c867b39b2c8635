"""FSDP2's ``fully_shard``: full and hybrid sharding, which differ only in the mesh."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_shard import devices
from lightning_shard.engines._fsdp2 import reduce_over, units_of
from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.fsdp2 import FSDP2Engine
from lightning_shard.engines.memory_model import FSDPFacts
from lightning_shard.engines.sharding import ApplyUnit, UnitOptions
from lightning_shard.engines.units import unit_rules
from lightning_shard.errors import ConfigurationError, MeshError, PrecisionError
from lightning_shard.mesh import REPLICATE, SHARD, MeshConfig, resolve_mesh, shard_group_of_its_own


@dataclass(frozen=True, kw_only=True)
class FSDPOptions(UnitOptions):
    """Options of FSDP2, see ``ShardFSDPStrategy``."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_offload: bool = False
    separate_reduce_scatter: bool = False
    symmetric_memory: bool = False
    custom_all_gather: Callable[..., Any] | None = None


class FullyShard(FSDP2Engine):
    """Parameters, gradients and optimizer state are sharded over the mesh's axis ``shard``."""

    name = "fsdp"
    strategy = "ShardFSDPStrategy"

    _options: FSDPOptions

    def check(self, run: PlannedRun) -> None:
        if self._options.symmetric_memory and run.device_type != "cuda":
            raise ConfigurationError(
                f"symmetric_memory is true, but only NCCL has it, and the run is on {run.device_type}. Set it to false."
            )
        size = self._shape(run)[1]
        rules = unit_rules(self._units.units)
        of_rules = [rule.reshard_after_forward for rule in rules]
        for ranks in [self._units.reshard_after_forward, *(r for r in of_rules if r is not None)]:
            if not isinstance(ranks, bool) and (ranks < 2 or ranks >= size or size % ranks != 0):
                raise MeshError(
                    f"reshard_after_forward is {ranks}, but a number must divide the shard axis' size {size} and be "
                    f"neither 1 (that is false) nor {size} (that is true)."
                )
        if any(rule.compute for rule in rules) and run.policy.autocast is not None:
            raise PrecisionError("units have a compute dtype under autocast, which casts by operator. Remove one.")
        if any(rule.compute == "fp16" for rule in rules) and run.policy.compute != torch.float16:
            raise PrecisionError(
                f"units compute in fp16 in precision {run.precision!r}, but small gradients of fp16 are lost without a "
                "loss scale. Use precision '16-mixed', or bf16 for these units."
            )

    def _shape(self, run: PlannedRun) -> tuple[int, int]:
        return resolve_mesh(self._options.mesh, world_size=run.ranks, processes_per_node=run.per_node)

    def memory_model(self, module: nn.Module, run: PlannedRun) -> FSDPFacts:
        replicate, shard = self._shape(run)
        return FSDPFacts(
            replicate=replicate,
            shard=shard,
            reshard_after_forward=self._units.reshard_after_forward,
            cpu_offload=self._options.cpu_offload,
            backward_prefetch=self._units.backward_prefetch,
            reduce_at_boundary=self._at_boundary and run.ranks > 1,
        )

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        if self._options.cpu_offload:
            devices.step_on_all_cores(run.device, run.planned.per_node, os.environ, says=run.mesh.get_rank() == 0)
        prepared = super().prepare(module, run)
        if self._options.separate_reduce_scatter:
            reduce_over(module, shard_group_of_its_own(run.mesh, "reduce-scatter"))
        for unit in units_of(module):
            if self._options.symmetric_memory:
                unit.set_symm_mem_for_comm()
            if self._options.custom_all_gather is not None:
                unit.set_custom_all_gather(self._options.custom_all_gather)
        skip_layers(module)
        return prepared

    def _applier(self, run: Run) -> ApplyUnit:
        mesh = run.mesh
        to_host = self._options.cpu_offload
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if to_host else OffloadPolicy()
        # A 1-D mesh without replicas saves an all-reduce over one rank after the reduce-scatter.
        over = mesh if mesh[REPLICATE].size() > 1 else mesh[SHARD]
        return partial(fully_shard, mesh=over, offload_policy=offload)


def skip_layers(root: nn.Module) -> None:
    """Let Hugging Face's models skip layers at random (LayerDrop) as under other engines. Many run all layers of a
    module with torch's FSDP mark, because ranks might skip different ones, which is refused here. Modules with
    ``generate`` keep the mark.
    """
    for module in root.modules():
        config = getattr(module, "config", None)
        drops = any("layerdrop" in name and value for name, value in getattr(config, "__dict__", {}).items())
        if drops and not hasattr(module, "generate"):
            module._is_fsdp_managed_module = False  # type: ignore[assignment]
