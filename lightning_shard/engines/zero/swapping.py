"""Masters, optimizer slots and parameters that ZeRO-Infinity offloads to NVMe, as tensors mapped from their files.

DeepSpeed swaps one sub-group after the other into buffers for its step. Between steps its empty tensors are mapped from
their files (``torch.from_file``), so that all code reads and writes them in place. Sub-groups and parameters of less
than 1 MiB per rank stay in memory (``MIN_AIO_BYTES``). Gradients are accumulated in host memory, and the step takes
them from there, unscaled and clipped.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_shard.private_names import wrap

IN_FILES = "nvme"  # DeepSpeed's ``final_location`` of a parameter shard in a file.


def swaps_optimizer(zero: Any) -> bool:
    """Whether DeepSpeed's optimizer ``zero`` swaps optimizer state to files."""
    return getattr(zero, "optimizer_swapper", None) is not None


def swapped_groups(zero: Any) -> Iterator[int]:
    """The sub-groups whose masters and slots are in files."""
    return (i for i in range(len(zero.fp16_groups) if swaps_optimizer(zero) else 0) if is_swapped(zero, i))


def is_swapped(zero: Any, index: int) -> bool:
    if not swaps_optimizer(zero):
        return False
    return bool(zero.optimizer_swapper.is_swappable_tensor(numel=zero.fp16_partitioned_groups_flat_numel[index]))


def keep_gradients_in_memory(zero: Any) -> None:
    """Let the steps of ``zero`` take gradients from memory, and add buffers for all slots of the optimizer."""
    if not swaps_optimizer(zero):
        return

    def leave_gradient(to_file: Callable[..., None], parameter: Any, gradient: Tensor, *args: Any) -> None:
        if not is_swapped(zero, zero.grad_position[zero.get_param_id(parameter)][0]):
            to_file(parameter, gradient, *args)

    def prepare_with_gradient(prepare: Callable[..., None], index: int, *args: Any) -> None:
        if is_swapped(zero, index):
            _add_buffers(zero.optimizer_swapper, _info(zero, index).num_tensors())
        prepare(index, *args)
        if is_swapped(zero, index):
            flat = zero.fp32_partitioned_groups_flat[index]
            flat.grad = host_gradient(zero, index).to(flat.dtype)

    wrap(zero, "_offload_grad_partition_at_boundary", leave_gradient)
    wrap(zero, "_prepare_sub_group", prepare_with_gradient)


def _info(zero: Any, index: int) -> Any:
    return zero.optimizer_swapper._get_param_swap_info(zero.fp32_partitioned_groups_flat[index])


def _add_buffers(swapper: Any, used: int) -> None:
    """Add buffers up to one for each tensor of a sub-group, and one to write new slots through. DeepSpeed asserts that
    ``buffer_count`` suffices, but the number of slots is unknown before the optimizer's first step.
    """
    manager = swapper.swap_buffer_manager
    while len(manager.free_buffer_index) <= used:
        example = torch.zeros(1, dtype=manager.dtype)
        manager.free_buffer_index.append(len(manager.all_buffers))
        manager.all_buffers.append(manager.aio_handle.new_cpu_locked_tensor(manager.num_elems, example).zero_())
        manager.count += 1


def host_gradient(zero: Any, index: int) -> Tensor:
    """This rank's accumulated gradients of a sub-group, in place: 1-D, in the order of its masters."""
    sizes = zero.fp16_partitioned_groups_flat_numel
    return zero.grad_partitions_flat_buffer.narrow(0, sum(sizes[:index]), sizes[index])


def map_swapped_state(zero: Any) -> None:
    """Replace the empty masters and slots of all swapped sub-groups by tensors mapped from their files."""
    for index in swapped_groups(zero):
        info = _info(zero, index)
        for context in info.tensors:
            context.compute_tensor.data = _mapped(context.swap_path, info.numel(), zero.optimizer_swapper.dtype)


def create_slot(zero: Any, index: int, slot: str) -> Tensor:
    """Make a zero slot of a swapped sub-group, mapped from a new file that DeepSpeed will swap in."""
    swapper, flat = zero.optimizer_swapper, zero.fp32_partitioned_groups_flat[index]
    path = os.path.join(swapper.swap_folder, f"{slot}-{flat.ds_id}.tensor.swp")
    blocks = -(-flat.numel() // swapper.numel_alignment)
    with open(path, "wb") as file:
        file.truncate(blocks * swapper.numel_alignment * swapper.swap_element_size)
    return _mapped(path, flat.numel(), swapper.dtype)


def register_slots(zero: Any) -> None:
    """Let DeepSpeed swap the slots that the optimizer has now, after they were replaced."""
    if not swaps_optimizer(zero):
        return
    zero.optimizer_swapper.purge_state()
    for index in swapped_groups(zero):
        _info(zero, index)  # Registers the slots in the optimizer's state.


def live_shard(parameter: Any) -> Tensor:
    """This rank's shard of a parameter under stage 3, with its padding: in memory, or mapped from its file."""
    if parameter.ds_tensor.final_location != IN_FILES:
        return parameter.ds_tensor.detach()
    swapper = parameter.nvme_swapper
    return _mapped(swapper.get_path(parameter, True), parameter.ds_tensor.ds_numel, swapper.dtype)


def take_shard(parameter: Any) -> None:
    """Take a shard from DeepSpeed's swapper. From a file it is mapped, and the file can be unlinked."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    parameter.ds_tensor.data, parameter.ds_tensor.status = live_shard(parameter), PartitionedParamStatus.AVAILABLE
    parameter.ds_tensor.final_location = None
    parameter.nvme_swapper = None


def give_shard(parameter: Any, swapper: Any) -> None:
    """Give a shard in memory to ``swapper``, which writes large ones to a file, as ``zero.Init`` does."""
    parameter.nvme_swapper = swapper
    tensor = parameter.ds_tensor
    if swapper is None or not swapper.swappable_tensor(numel=tensor.ds_numel):
        return
    values = tensor.data
    tensor.data = swapper.get_buffer(parameter, tensor.ds_numel)
    tensor.copy_(values)
    tensor.final_location = IN_FILES
    swapper.swap_out_and_release([parameter])


def deduplicate_reads(swapper: Any) -> None:
    """Let ``swapper``, if any, read a parameter of two consecutive modules once: DeepSpeed has no second buffer."""

    def swap_in_once(swap_in: Callable[..., Any], params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        return swap_in(list(dict.fromkeys(params)), *args, **kwargs)

    if swapper is not None:
        wrap(swapper, "swap_in", swap_in_once)


def release_files(zero: Any, parameters: Iterable[Any]) -> None:
    """Take masters, slots and ``parameters`` from DeepSpeed. Their files are mapped then, and can be unlinked."""
    map_swapped_state(zero)
    swappers = {}
    for parameter in parameters:
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is None:
            continue
        swappers[id(swapper)] = swapper
        take_shard(parameter)
    for swapper in swappers.values():
        # Page-locked memory is not freed with its owner.
        for buffer in (swapper.buffers, swapper.partitioned_swap_buffer):
            if buffer is not None:
                swapper.aio_read_handle.free_cpu_locked_tensor(buffer)


def _mapped(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
