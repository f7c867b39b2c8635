"""The live tensors of a run whose optimizer steps flat partitions, stages 1 to 3 in a fit, and those of its engine."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.resident import Resident, buffers, memory_of, optimizer_tensors, tensors_in
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero.running import Running
from lightning_shard.engines.zero.stepping import Stepping
from lightning_shard.engines.zero.values import Values
from lightning_shard.tensors.flat import Accumulated, AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import parameter_names


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatTensors:
    """See `lightning_shard.engines.engine.EngineTensors`."""

    module: nn.Module
    running: Running
    values: Values
    # The module's, listed while no forward ran: stage 3 gathers what is read off a module in the middle of its forward,
    # and takes it for a parameter that the module needs from then on.
    parameters: Sequence[Tensor]
    stepping: Stepping
    device: torch.device

    def masters(self) -> Mapping[str, LiveTensor]:
        return self.values.tensors(self.running)

    def optimizers(self) -> Sequence[AnyOptimizer]:
        return self.stepping.optimizers()

    def stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        return self.stepping.stepped(optimizer)

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        return self.stepping.gradient(fqn)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return self.stepping.gradients(optimizer)

    def accumulated(self, begin: Collection[str] = ()) -> Mapping[str, Accumulated]:
        names: dict[Tensor, str] = {p: n for p, n in parameter_names(self.module).items() if p.requires_grad}
        return dict(layout.accumulated(self.running.zero, self.running.groups, names, begin))

    def resident(self) -> Iterator[Resident]:
        """Those in files are the ones mapped between steps."""
        zero, parameters, device = self.running.zero, self.parameters, self.device
        stage_3 = layout.kind(zero) == layout.STAGE_3
        for parameter in parameters:
            yield from _parameter(parameter, device=device, offloaded=stage_3 and zero.offload_param)
        stepping = "host" if layout.is_offloaded(zero) else "device"
        flats = list(layout.flats(zero))
        memories = {id(flat): "nvme" if swapping.is_swapped(zero, i) else stepping for i, flat in enumerate(flats)}
        yield from (Resident("masters", memories[id(flat)], flat) for flat in flats)
        yield from (Resident("masters", "host", part.data) for part in self.values.kept.values())
        yield from (Resident("gradients", "device", p.grad) for p in parameters if p.grad is not None)
        # Full, sharded, or a buffer that accumulates shards: by the kind of DeepSpeed's optimizer.
        buffered = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
        for tensor in tensors_in([getattr(zero, name, None) for name in buffered]):
            yield Resident("gradients", stepping, tensor)
        yield from (Resident("gradients", stepping, flat.grad) for flat in flats if flat.grad is not None)
        yield from optimizer_tensors([zero.optimizer], lambda stepped, _: memories.get(id(stepped), stepping))
        yield from buffers(self.module, device=device)
        yield from _staging(zero, parameters, device=device)

    def unsharded(self) -> Iterable[Resident]:
        return (Resident("gathered", "device", p.data) for p in self.parameters if layout.is_partitioned(p))


def _parameter(parameter: Any, *, device: torch.device, offloaded: bool) -> Iterator[Resident]:
    if not layout.is_partitioned(parameter):
        yield Resident("parameters", memory_of(parameter, device), parameter)
        return
    in_file = parameter.ds_tensor.final_location == swapping.IN_FILES
    memory = "nvme" if in_file else "host" if offloaded else "device"
    yield Resident("parameters", memory, swapping.shard_of(parameter))
    if parameter.ds_secondary_tensor is not None:
        # hpZ's copy of the shard, over fewer ranks.
        yield Resident("parameters", "device", parameter.ds_secondary_tensor)
    # Empty while the parameter is not gathered.
    yield Resident("gathered", "device", parameter.data)


def _staging(zero: Any, parameters: Iterable[Any], *, device: torch.device) -> Iterator[Resident]:
    """Whatever else DeepSpeed's optimizer refers to: buckets, and buffers between host, device and files."""
    swappers = {id(s): s for p in parameters if (s := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        for tensor in tensors_in([swapper.buffers, swapper.partitioned_swap_buffer]):
            yield Resident("communication", "host", tensor)
    if swapping.swaps(zero):
        for tensor in tensors_in(zero.optimizer_swapper.swap_buffer_manager.all_buffers):
            yield Resident("communication", "host", tensor)
    for name, value in vars(zero).items():
        # DeepSpeed names its buffers on the host so, which on a CPU nothing else tells from the others.
        on_host = "cpu" in name or "pin_buffer" in name
        for tensor in tensors_in(value):
            yield Resident("communication", "host" if on_host else memory_of(tensor, device), tensor)
