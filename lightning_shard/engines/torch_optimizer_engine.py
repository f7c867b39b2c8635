"""The base of engines whose optimizers step the module's own parameters: full ones, or FSDP2's shards."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_shard.engines import optimizer_remap
from lightning_shard.engines._fsdp2 import accumulated_gradients
from lightning_shard.engines.engine import Engine, Run
from lightning_shard.engines.external_writes import ForeignStepCheck
from lightning_shard.engines.memory_breakdown import Resident, module_tensors, unsharded
from lightning_shard.engines.memory_model import plain_settings
from lightning_shard.engines.owner_steps import OwnerSteps, needs_of
from lightning_shard.engines.replicated import common_random_numbers, full_parameters_in_own_groups
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.mesh import REPLICATE, SHARD
from lightning_shard.tensors.clipping import gradients_of
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import parameter_names


class TorchOptimizerEngine(Engine):
    """See `lightning_shard.engines.engine.Engine`."""

    steps_itself = False
    _mixes_shards = False  # Whether an optimizer's group may have both shards and full parameters.
    follows_freezing = True

    _module: nn.Module
    _run: Run

    def __init__(self, options: Any, forward: ForwardOptions, *, at_boundary: bool) -> None:
        """``at_boundary``: accumulated gradients are reduced once, not in each micro-batch."""
        self._options, self._forward_options, self._at_boundary = options, forward, at_boundary
        self._wrapped: DistributedDataParallel | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._owner_steps: dict[int, OwnerSteps] = {}  # By the ``id`` of their optimizer.
        self._shards: Mapping[Tensor, str] = {}  # FSDP's, with their FQNs.
        self.upcast: Mapping[str, torch.dtype] = {}
        self._closing = ExitStack()

    def resolved_config(self) -> Mapping[str, Any]:
        return plain_settings(self._options, self._forward_options, at_boundary=self._at_boundary)

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        optimizer_remap.remap_optimizers(optimizers, self._module)
        self._optimizers = optimizers
        self._foreign_steps = ForeignStepCheck(self._module, optimizers)
        self._closing.callback(self._foreign_steps.remove_hooks)
        self._needs = {id(optimizer): needs_of(optimizer, self._run) for optimizer in optimizers}
        # The closure may draw this rank's own random numbers.
        self.steps_itself = any(needs.draws for needs in self._needs.values())
        return list(optimizers), None

    def replicas(self) -> dist.ProcessGroup | None:
        mesh = self._run.mesh[REPLICATE]
        return mesh.get_group() if mesh.size() > 1 else None

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        if skip:
            return
        owner_steps, mesh = self._owner_steps.get(id(optimizer)), self._run.mesh
        replicated = self.needs(optimizer).draws and mesh[REPLICATE].size() > 1
        mixed = self._mixes_shards and owner_steps is None
        with (
            common_random_numbers(mesh[SHARD].get_local_rank()) if replicated else nullcontext(),
            full_parameters_in_own_groups(optimizer) if mixed else nullcontext(),
        ):
            (optimizer.step if owner_steps is None else owner_steps.step_parameters)(**kwargs)

    def before_saving(self) -> None:
        for owner_steps in self._owner_steps.values():
            owner_steps.share_state()

    def free_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def release_module(self, *, failed: bool) -> None:
        # Undo the preparations so far, in reverse order.
        self._closing.close()

    def masters(self) -> Mapping[str, LiveTensor]:
        return {}

    def optimizers(self) -> Sequence[AnyOptimizer]:
        steps = self._owner_steps
        return [steps[id(o)].as_owned_optimizer() if id(o) in steps else o for o in self._optimizers]

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        owner_steps = self._owner_steps.get(id(optimizer))
        return None if owner_steps is None else owner_steps.stepped_parameters()

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        return parameter.grad

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], DeviceMesh | None]:
        return gradients_of([p for group in optimizer.param_groups for p in group["params"]]), None

    def accumulated(self) -> Mapping[str, LiveTensor]:
        found = {self._shards[shard]: gradient for shard, gradient in accumulated_gradients(self._module)}
        for parameter, fqn in parameter_names(self._module).items():
            if parameter.grad is not None:
                found.setdefault(fqn, parameter.grad)
        return found

    def memory_breakdown(self) -> Iterable[Resident]:
        return module_tensors(self._module, self._optimizers, device=self._run.device, wrapper=self._wrapped)

    def unsharded(self) -> Iterable[Resident]:
        return unsharded(self._module)
