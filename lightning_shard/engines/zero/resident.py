"""The tensors that a rank holds under DeepSpeed's ZeRO; see `lightning_shard.engines.resident`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.resident import Resident, buffers, memory_of, optimizer_tensors, tensors_in
from lightning_shard.engines.zero import layout, swapping


def zero_tensors(
    zero: Any,
    module: nn.Module,
    *,
    device: torch.device,
    parameters: Sequence[Tensor] | None = None,
    kept: Iterable[Tensor] = (),
) -> Iterator[Resident]:
    """What DeepSpeed's engine and a module under it hold. Tensors of files are those that are mapped between steps.

    Args:
        zero: the engine's ``optimizer``, of stages 1 to 3.
        module: under the engine.
        device: where this rank computes.
        parameters: the module's, listed while no forward ran. Stage 3 gathers what is read off a module in the middle
            of its forward, and takes it for a parameter that the module needs from then on.
        kept: values on the host that stand beside the module's parameters as masters do.
    """
    stage_3 = layout.kind(zero) == layout.STAGE_3
    offloaded = bool(getattr(zero, "offload_optimizer" if stage_3 else "cpu_offload", False))
    parameters = list(module.parameters()) if parameters is None else parameters
    for parameter in parameters:
        yield from _parameter(parameter, device=device, offloaded=stage_3 and zero.offload_param)
    stepping = "host" if offloaded else "device"
    flats = list(layout.flats(zero))
    memories = {id(flat): "nvme" if swapping.is_swapped(zero, index) else stepping for index, flat in enumerate(flats)}
    yield from (Resident("masters", memories[id(flat)], flat) for flat in flats)
    yield from (Resident("masters", "host", values) for values in kept)
    yield from (Resident("gradients", "device", p.grad) for p in parameters if p.grad is not None)
    # Whole, or this rank's part, or where parts are summed up: by the kind of DeepSpeed's optimizer.
    held = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
    for tensor in tensors_in([getattr(zero, name, None) for name in held]):
        yield Resident("gradients", stepping, tensor)
    yield from (Resident("gradients", stepping, flat.grad) for flat in flats if flat.grad is not None)
    yield from optimizer_tensors([zero.optimizer], lambda stepped, _: memories.get(id(stepped), stepping))
    yield from buffers(module, device=device)
    yield from _staging(zero, parameters, device=device)


def _parameter(parameter: Any, *, device: torch.device, offloaded: bool) -> Iterator[Resident]:
    if not layout.is_cut(parameter):
        yield Resident("parameters", memory_of(parameter, device), parameter)
        return
    in_file = parameter.ds_tensor.final_location == swapping.IN_FILES
    memory = "nvme" if in_file else "host" if offloaded else "device"
    yield Resident("parameters", memory, swapping.piece(parameter))
    if parameter.ds_secondary_tensor is not None:
        # hpZ's copy of the piece, which fewer ranks share.
        yield Resident("parameters", "device", parameter.ds_secondary_tensor)
    # Empty while the parameter is not gathered.
    yield Resident("gathered", "device", parameter.data)


def unsharded(parameters: Iterable[Tensor]) -> Iterator[Resident]:
    """What is gathered of stage 3's parameters at this moment; they are listed as for `zero_tensors`."""
    return (Resident("gathered", "device", p.data) for p in parameters if layout.is_cut(p))


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
