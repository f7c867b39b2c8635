"""The live tensors of a run whose optimizer steps flat partitions, stages 1 to 3 in a fit, and those of its engine."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.resident import Resident, buffers, memory_of, optimizer_tensors, tensors_in
from lightning_shard.engines.whole_steps import WholeSteps
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero.running import Running
from lightning_shard.engines.zero.several import SeveralOptimizers
from lightning_shard.engines.zero.values import Values
from lightning_shard.tensors.flat import Accumulated, AnyOptimizer, FlatOptimizer, LiveTensor


class FlatTensors:
    """See `lightning_shard.engines.engine.EngineTensors`."""

    def __init__(
        self,
        module: nn.Module,
        running: Running,
        values: Values,
        parameters: Sequence[Tensor],
        *,
        whole: WholeSteps | None,
        several: SeveralOptimizers | None,
        device: torch.device,
    ) -> None:
        """``parameters`` are the module's, listed while no forward ran.

        Stage 3 gathers what is read off a module in the middle of its forward, and takes it for a parameter that the
        module needs from then on.
        """
        self._several = several
        self._module = module
        self._running = running
        self._values = values
        self._parameters = parameters
        self._whole = whole
        self._device = device

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around the user's."""
        return self._running.zero

    def masters(self) -> Mapping[str, LiveTensor]:
        return self._values.tensors(self._running)

    def optimizers(self) -> Sequence[AnyOptimizer]:
        assert self._running.optimizer is not None
        if self._several is not None:
            return [whole.owned() for whole in self._several.all()]
        if self._whole is not None:
            return [self._whole.owned()]
        return [FlatOptimizer(optimizer=self._running.optimizer, groups=self._running.groups)]

    def stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        if self._several is not None:
            return self._several.whole(optimizer).stepped()
        if self._whole is not None:
            return self._whole.stepped()
        return [(m.fqn, group.flat) for group in self._running.groups for m in group.members if m.stepped]

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        if self._several is not None:
            return self._several.gradient(fqn)
        if not self._running.pending:
            return None
        return layout.gradient_of(self.zero, self._running.groups, fqn)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        if self._several is not None:
            return self._several.gradients(optimizer)
        return layout.reduced_gradients(self.zero) if self._running.pending else []

    def accumulated(self, begin: Collection[str] = ()) -> Mapping[str, Accumulated]:
        names: dict[Tensor, str] = {p: n for n, p in self._module.named_parameters() if p.requires_grad}
        return dict(layout.accumulated(self.zero, self._running.groups, names, begin))

    def resident(self) -> Iterator[Resident]:
        """Those in files are the ones mapped between steps."""
        zero, parameters, device = self.zero, self._parameters, self._device
        stage_3 = layout.kind(zero) == layout.STAGE_3
        for parameter in parameters:
            yield from _parameter(parameter, device=device, offloaded=stage_3 and zero.offload_param)
        stepping = "host" if layout.is_offloaded(zero) else "device"
        flats = list(layout.flats(zero))
        memories = {
            id(flat): "nvme" if swapping.is_swapped(zero, index) else stepping for index, flat in enumerate(flats)
        }
        yield from (Resident("masters", memories[id(flat)], flat) for flat in flats)
        yield from (Resident("masters", "host", part.data) for part in self._values.kept.values())
        yield from (Resident("gradients", "device", p.grad) for p in parameters if p.grad is not None)
        # Full, sharded, or a buffer that accumulates shards: by the kind of DeepSpeed's optimizer.
        buffered = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
        for tensor in tensors_in([getattr(zero, name, None) for name in buffered]):
            yield Resident("gradients", stepping, tensor)
        yield from (Resident("gradients", stepping, flat.grad) for flat in flats if flat.grad is not None)
        yield from optimizer_tensors([zero.optimizer], lambda stepped, _: memories.get(id(stepped), stepping))
        yield from buffers(self._module, device=device)
        yield from _staging(zero, parameters, device=device)

    def unsharded(self) -> Iterable[Resident]:
        return gathered(self._parameters)


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


def gathered(parameters: Iterable[Tensor]) -> Iterator[Resident]:
    """What is gathered of stage 3's parameters at this moment, of the module's ``parameters``."""
    return (Resident("gathered", "device", p.data) for p in parameters if layout.is_partitioned(p))


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
