"""Where DeepSpeed's optimizers keep gradients: while they wait, when they are whole, and what is left after a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_shard.engines.zero import swapping
from lightning_shard.engines.zero.layout import BF16, STAGE_3, STAGES_1_2, flats, kind
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatSlice, FlatTensor


def held(zero: Any, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """FQN and the tensor in which a parameter's gradients of one micro-batch wait for the next ones.

    Whole or a part, as the stage keeps it; several parameters may wait in one tensor.

    Args:
        zero: DeepSpeed's optimizer.
        names: FQN of each trainable parameter.
    """
    if kind(zero) == STAGE_3:
        yield from ((fqn, zero.grad_partitions_flat_buffer) for fqn in names.values())
    elif kind(zero) == BF16:
        for parameters, waiting in zip(zero.bf16_groups, zero.fp32_groups_gradients, strict=True):
            yield from ((names[p], gradient) for p, gradient in zip(parameters, waiting, strict=True))
    elif not zero.partition_gradients:
        waiting = ((fqn, zero.get_param_gradient_attribute(p)) for p, fqn in names.items())
        yield from ((fqn, gradient) for fqn, gradient in waiting if gradient is not None)
    else:
        for index, parameters in enumerate(zero.params_in_partition):
            yield from _held_in_partition(zero, index, {p: names[p] for p in parameters})


def _held_in_partition(zero: Any, index: int, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    if parts := zero.averaged_gradients.get(index):
        # DeepSpeed accumulates in another dtype than it computes in.
        yield from ((fqn, parts[0]) for fqn in names.values())
    elif zero.cpu_offload:
        fqns = {zero.get_param_id(p): fqn for p, fqn in names.items()}
        yield from ((fqns[i], gradient) for i, gradient in zero.accumulated_grads_in_cpu.items() if i in fqns)
    else:
        yield from zip(names.values(), zero.all_grad_tensors.get(index) or [], strict=False)


def reduced(zero: Any) -> list[Tensor]:
    """This rank's reduced gradients, disjoint from those of other ranks; padding in them is zero.

    They are complete from the end of an accumulation until the step.
    """
    return [part for index in range(len(flats(zero))) for part in _gradient_parts(zero, index)]


def of_parameter(zero: Any, groups: Sequence[FlatGroup], fqn: str) -> FlatTensor | None:
    """This rank's part of one parameter's reduced gradient, in place; None where there is none."""
    for index, group in enumerate(groups):
        for member in group.members:
            if member.fqn == fqn and member.stepped and (parts := _gradient_parts(zero, index)):
                return FlatTensor(member.shape, parts[0].dtype, _cut_out(parts, member))
    return None


def forget(zero: Any) -> None:
    """After a step, taken or skipped: leave nothing of its gradients where DeepSpeed keeps the next ones.

    It writes the gradients that come and reads all, so that a parameter without one would be stepped on its last one;
    and under offload stages 1 and 2 would add to what a skipped step left.
    """
    if kind(zero) == STAGES_1_2:
        for index in zero.averaged_gradients:
            zero.averaged_gradients[index] = None
    if kind(zero) == STAGE_3:
        zero.grad_partitions_flat_buffer.zero_()
    if kind(zero) != BF16 and (zero.offload_optimizer if kind(zero) == STAGE_3 else zero.cpu_offload):
        for flat in flats(zero):
            if flat.grad is not None:
                flat.grad.zero_()


def _cut_out(parts: Sequence[Tensor], member: FlatMember) -> Iterator[FlatSlice]:
    """The pieces of a member in tensors that lie behind one another as the flat tensor does."""
    begin = 0
    for part in parts:
        low = max(begin, member.offset)
        high = min(begin + part.numel(), member.offset + member.length)
        if low < high:
            data = part.detach().view(-1)[low - begin : high - begin]
            yield FlatSlice(data=data, start=member.start + low - member.offset)
        begin += part.numel()


def _gradient_parts(zero: Any, index: int) -> list[Tensor]:
    if kind(zero) == BF16:
        return [zero.fp32_groups_gradient_flat_partition[index]]
    if swapping.is_swapped(zero, index):
        return [swapping.gradient(zero, index)]
    if zero.offload_optimizer if kind(zero) == STAGE_3 else zero.cpu_offload:
        gradient = flats(zero)[index].grad
        return [] if gradient is None else [gradient]
    return list(zero.averaged_gradients.get(index) or [])
