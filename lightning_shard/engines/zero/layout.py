"""Where DeepSpeed's optimizers keep what they step: flat partitions, read as ranges of the parameters.

Stages 1 and 2 put a group's parameters behind one another and cut the whole into equal partitions; stage 3 cuts each
parameter and puts a rank's pieces behind one another, in sub-groups. These are the only functions that know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_shard.engines.zero import swapping
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatSlice, FlatTensor

STAGES_1_2 = "DeepSpeedZeroOptimizer"
BF16 = "BF16_Optimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


def kind(zero: Any) -> str:
    """Which of DeepSpeed's optimizers ``zero`` is, by its class."""
    return type(zero).__name__


def flat_groups(zero: Any, names: Mapping[Tensor, str]) -> list[FlatGroup]:
    """What ``zero`` steps, with the parameters that lie in it, on this rank.

    Args:
        zero: the engine's optimizer.
        names: FQN of each parameter that it steps.
    """
    if kind(zero) == STAGE_3:
        return list(_stage_3(zero, names))
    if kind(zero) == BF16:
        layouts = [(group, _cumulative(group)) for group in zero.bf16_groups]
        flats = zero.fp32_groups_flat_partition
    else:
        layouts = list(zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True))
        flats = zero.single_partition_of_fp32_groups
    groups = []
    for index, (parameters, offsets) in enumerate(layouts):
        process_group = zero.real_dp_process_group[index]
        begin = dist.get_rank(process_group) * flats[index].numel()
        members = [
            _overlap(names[parameter], parameter, offset, begin, flats[index].numel())
            for parameter, offset in zip(parameters, offsets, strict=True)
        ]
        group = zero.optimizer.param_groups[index]
        groups.append(FlatGroup(flat=flats[index], members=tuple(members), group=group))
    return groups


def with_frozen(
    groups: Sequence[FlatGroup], given: Sequence[Sequence[Tensor]], names: Mapping[Tensor, str]
) -> list[FlatGroup]:
    """``groups`` with the parameters that the user put into them and that are not stepped, because they are frozen.

    Args:
        groups: from `flat_groups`.
        given: the parameters of each of the user's groups; empty where DeepSpeed made the optimizer.
        names: FQN of each parameter.
    """
    stepped = {member.fqn for group in groups for member in group.members}
    found = list(groups)
    last = {id(group.group): index for index, group in enumerate(found)}
    # DeepSpeed drops groups without parameters, and keeps the order of the others.
    for index, parameters in zip(last.values(), [group for group in given if group], strict=False):
        frozen = [p for p in parameters if names[p] not in stepped]
        members = [FlatMember(fqn=names[p], shape=true_shape(p), stepped=False) for p in frozen]
        found[index] = replace(found[index], members=(*found[index].members, *members))
    return found


def true_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter, also where stage 3 has cut it."""
    return tuple(parameter.ds_shape if is_cut(parameter) else parameter.shape)


def _cumulative(parameters: Iterable[Tensor]) -> list[int]:
    offsets, total = [], 0
    for parameter in parameters:
        offsets.append(total)
        total += parameter.numel()
    return offsets


def _overlap(fqn: str, parameter: Tensor, offset: int, begin: int, size: int) -> FlatMember:
    """The part of a parameter at ``offset`` of the whole that lies in the partition ``[begin, begin + size)``."""
    low, high = max(offset, begin), min(offset + parameter.numel(), begin + size)
    if low >= high:
        return FlatMember(fqn=fqn, shape=tuple(parameter.shape), offset=0, start=0, length=0)
    return FlatMember(fqn=fqn, shape=tuple(parameter.shape), offset=low - begin, start=low - offset, length=high - low)


def _stage_3(zero: Any, names: Mapping[Tensor, str]) -> Iterator[FlatGroup]:
    for index, parameters in enumerate(zero.fp16_groups):
        offset, members = 0, []
        for parameter in parameters:
            start, length = own_range(parameter)
            shape = tuple(parameter.ds_shape)
            members.append(FlatMember(fqn=names[parameter], shape=shape, offset=offset, start=start, length=length))
            offset += parameter.partition_numel()
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        flat = zero.fp32_partitioned_groups_flat[index]
        new_slot = partial(swapping.new_slot, zero, index) if swapping.is_swapped(zero, index) else None
        yield FlatGroup(flat=flat, members=tuple(members), group=group, new_slot=new_slot)


def own_range(parameter: Any) -> tuple[int, int]:
    """Start and length of this rank's piece of a parameter that stage 3 has cut, without its padding."""
    size = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def cut(parameter: Any) -> FlatTensor:
    """This rank's piece of a parameter that stage 3 has cut, in the dtype that forward sees."""
    start, length = own_range(parameter)
    data = swapping.piece(parameter).narrow(0, 0, length)
    return FlatTensor(tuple(parameter.ds_shape), data.dtype, [FlatSlice(data=data, start=start)])


def is_cut(parameter: Tensor) -> bool:
    """Whether stage 3 has cut ``parameter``."""
    return hasattr(parameter, "ds_tensor")


def pieces(groups: Sequence[FlatGroup]) -> Iterator[tuple[FlatMember, Tensor]]:
    """Each parameter's member with its part of the flat tensor, a live 1-D view that may have no elements."""
    for group in groups:
        for member in group.members:
            yield member, group.flat.detach().narrow(0, member.offset, member.length)


def masters(groups: Sequence[FlatGroup]) -> dict[str, FlatTensor]:
    """FQN to what this rank steps of the parameter."""
    return {
        member.fqn: FlatTensor(member.shape, part.dtype, [FlatSlice(data=part, start=member.start)])
        for member, part in pieces(groups)
    }


def flats(zero: Any) -> Sequence[Tensor]:
    """The flat tensors that DeepSpeed's optimizer ``zero`` steps on this rank."""
    if kind(zero) == BF16:
        return zero.fp32_groups_flat_partition
    return zero.fp32_partitioned_groups_flat if kind(zero) == STAGE_3 else zero.single_partition_of_fp32_groups
