"""The memory layout of DeepSpeed's optimizers: flat partitions of masters and gradients, read as slices of parameters.

Stages 1 and 2 concatenate a group's parameters and divide the result into equal partitions. Stage 3 divides each
parameter and concatenates a rank's shards in sub-groups. No other file knows this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.engines.owner_steps import Shard
from lightning_shard.engines.zero import swapping
from lightning_shard.private_names import wrap
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.names import named_parameters, unwrapped_modules

STAGES_1_2 = "DeepSpeedZeroOptimizer"
BF16 = "BF16_Optimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"


def optimizer_kind(zero: Any) -> str:
    """One of the three class names of DeepSpeed's optimizer ``zero``."""
    return type(zero).__name__


def flat_groups(zero: Any, names: Mapping[Tensor, str]) -> list[FlatGroup]:
    """List the flat tensors that DeepSpeed steps on this rank, with their parameters. ``names``: parameter to FQN."""
    if optimizer_kind(zero) == STAGE_3:
        return list(_stage_3_groups(zero, names))
    if optimizer_kind(zero) == BF16:
        layouts = [(group, [0, *accumulate(p.numel() for p in group)][:-1]) for group in zero.bf16_groups]
    else:
        layouts = list(zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True))
    groups = []
    for index, ((parameters, offsets), flat) in enumerate(zip(layouts, flat_masters(zero), strict=True)):
        begin = dist.get_rank(zero.real_dp_process_group[index]) * flat.numel()
        parts = zip(parameters, offsets, strict=True)
        members = tuple(_overlap(names[p], p, offset, begin, flat.numel()) for p, offset in parts)
        groups.append(FlatGroup(flat=flat, members=members, group=zero.optimizer.param_groups[index]))
    return groups


def _overlap(fqn: str, parameter: Tensor, offset: int, begin: int, size: int) -> FlatMember:
    """The part of a parameter at ``offset`` of its group in the partition ``[begin, begin + size)``."""
    low, high = max(offset, begin), min(offset + parameter.numel(), begin + size)
    shape = tuple(parameter.shape)
    if low >= high:
        return FlatMember(fqn=fqn, shape=shape)
    return FlatMember(fqn=fqn, shape=shape, offset=low - begin, start=low - offset, length=high - low)


def _stage_3_groups(zero: Any, names: Mapping[Tensor, str]) -> Iterator[FlatGroup]:
    for index, parameters in enumerate(zero.fp16_groups):
        offset, members = 0, []
        for parameter in parameters:
            start, length = own_range(parameter)
            shape = tuple(parameter.ds_shape)
            members.append(FlatMember(fqn=names[parameter], shape=shape, offset=offset, start=start, length=length))
            offset += parameter.partition_numel()
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        flat = zero.fp32_partitioned_groups_flat[index]
        new_slot = partial(swapping.create_slot, zero, index) if swapping.is_swapped(zero, index) else None
        yield FlatGroup(flat=flat, members=tuple(members), group=group, new_slot=new_slot)


def add_frozen(groups: list[FlatGroup], given: list[list[Tensor]], names: Mapping[Tensor, str]) -> list[FlatGroup]:
    """Add to ``groups`` the frozen parameters of the user's groups ``given``, which are not stepped."""
    stepped = {member.fqn for group in groups for member in group.members}
    found = list(groups)
    last = {id(group.group): index for index, group in enumerate(found)}
    # DeepSpeed drops groups without parameters, and keeps the order of the others.
    for index, parameters in zip(last.values(), [group for group in given if group], strict=False):
        frozen = [p for p in parameters if names[p] not in stepped]
        members = [FlatMember(fqn=names[p], shape=full_shape(p), stepped=False) for p in frozen]
        found[index] = replace(found[index], members=(*found[index].members, *members))
    return found


def flat_masters(zero: Any) -> Sequence[Tensor]:
    """The flat tensors that DeepSpeed's optimizer ``zero`` steps on this rank, a 1-D tensor for each group."""
    kind = optimizer_kind(zero)
    if kind == BF16:
        return zero.fp32_groups_flat_partition
    return zero.fp32_partitioned_groups_flat if kind == STAGE_3 else zero.single_partition_of_fp32_groups


def master_tensors(groups: Sequence[FlatGroup]) -> dict[str, FlatTensor]:
    """FQN to this rank's master weights of the parameter."""
    return {m.fqn: m.view(group.flat) for group in groups for m in group.members if m.stepped}


def master_slices(groups: Sequence[FlatGroup]) -> Iterator[tuple[FlatMember, Tensor]]:
    """Each parameter's member with its slice of the flat tensor, a live 1-D view that may be empty."""
    for group in groups:
        for member in group.members:
            yield member, group.flat.detach().narrow(0, member.offset, member.length)


def stepped_shards(zero: Any, groups: Sequence[FlatGroup]) -> list[Shard]:
    """This rank's shards of stepped parameters, with their gradients."""
    return [
        Shard(
            fqn=member.fqn,
            shape=torch.Size(member.shape),
            value=partial(group.flat.detach().narrow, 0, member.offset, member.length),
            gradient=partial(_gradient_shard, zero, index, member),
            group=group.group,
            tensor=group.flat,
        )
        for index, group in enumerate(groups)
        for member in group.members
        if member.stepped
    ]


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the full parameter, even if stage 3 has sharded it."""
    return tuple(parameter.ds_shape if is_partitioned(parameter) else parameter.shape)


def own_range(parameter: Any) -> tuple[int, int]:
    """Start and length of this rank's shard of a parameter under stage 3, without its padding."""
    size = parameter.partition_numel()
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def parameter_shard(parameter: Any) -> FlatTensor:
    """This rank's shard of a parameter under stage 3, in the compute dtype."""
    start, length = own_range(parameter)
    data = swapping.live_shard(parameter).narrow(0, 0, length)
    return FlatTensor(tuple(parameter.ds_shape), data.dtype, [FlatSlice(data=data, start=start)])


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def is_gathered(parameter: Any) -> bool:
    """Whether a parameter under stage 3 is full, and not being gathered."""
    return bool(parameter.ds_status.name == "AVAILABLE" and parameter.shape == parameter.ds_shape)


def watch_releases(parameters: Iterable[Any], note: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call ``note`` with each of ``parameters`` that stage 3 releases. Returns the function that ends this."""

    def partition(parameter: Tensor, own: Callable[..., None], param_list: Any = None, **kwargs: Any) -> None:
        own(param_list, **kwargs)
        for each in param_list or [parameter]:
            note(each)

    undo = ExitStack()
    for parameter in filter(is_partitioned, parameters):
        undo.callback(setattr, parameter, "partition", parameter.partition)
        wrap(parameter, "partition", partial(partition, parameter))
    return undo.close


def names_in_leaf_modules(module: nn.Module) -> set[str]:
    """FQNs of the parameters in leaf modules, which stage 3 gathers and reduces in full whatever part of them runs."""
    _, is_leaf = _parameter_queries()
    leaves = [(fqn, m) for fqn, m in unwrapped_modules(module) if is_leaf(m)]
    return {f"{fqn}.{name}".lstrip(".") for fqn, leaf in leaves for name in named_parameters(leaf)}


def gathered_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """FQN and module of each shard unit of stage 3: leaf modules, and others with parameters of their own."""
    inside, (_, is_leaf), found = names_in_leaf_modules(module), _parameter_queries(), []
    for fqn, part in unwrapped_modules(module):
        own = {f"{fqn}.{name}".lstrip(".") for name, _ in part.named_parameters(recurse=False)}
        if is_leaf(part) or own - inside:
            found.append((fqn, part))
    return found


def gathered_parameters(module: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Each of `gathered_modules` to the parameters that stage 3 gathers for it."""
    _, is_leaf = _parameter_queries()
    return {unit: [*unit.parameters(recurse=is_leaf(unit))] for _, unit in gathered_modules(module)}


def is_gathered_for(module: nn.Module) -> bool:
    """Whether stage 3 gathers parameters when the module runs: its own, or others that it was seen to use."""
    iter_params, is_leaf = _parameter_queries()
    return next(iter(iter_params(module, recurse=is_leaf(module))), None) is not None


@cache
def _parameter_queries() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    return iter_params, z3_leaf_module


def trace_gathered_modules(offload: Any) -> None:
    """Leave modules without gathered parameters out of the forward trace of a ``DeepSpeedZeRoOffload``. Ranks that run
    different ones, such as a dropout, would wait for each other when they compare it.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    def fetch(own: Callable[[nn.Module], None], module: nn.Module) -> None:
        (own if is_gathered_for(module) else FWD_MODULE_STACK.append)(module)

    wrap(offload, "pre_sub_module_forward_function", fetch)


def gradient_parts(zero: Any, index: int) -> list[Tensor]:
    """This rank's reduced gradients of a group, complete from the accumulation boundary to the step. The tensors follow
    one another as in the flat master, with zeros as padding. Empty: no parameter of the group has a gradient.
    """
    kind = optimizer_kind(zero)
    if kind == BF16:
        return [zero.fp32_groups_gradient_flat_partition[index]]
    if kind == STAGE_3 and swapping.is_swapped(zero, index):
        return [swapping.host_gradient(zero, index)]
    if steps_on_host(zero):
        wait_for_offloaded_gradients(zero)
        gradient = flat_masters(zero)[index].grad
        return [] if gradient is None else [gradient]
    averaged = zero.averaged_gradients.get(index) or []
    # Stage 3 has zeros there for parameters that accumulated gradients and were frozen in the last pass.
    return [swapping.host_gradient(zero, index)] if averaged and kind == STAGE_3 else list(averaged)


def gradient_of(zero: Any, groups: Sequence[FlatGroup], fqn: str) -> FlatTensor | None:
    """This rank's part of one parameter's reduced gradient, in place. None: it has no gradient."""
    for index, group in enumerate(groups):
        for member in group.members:
            if member.fqn == fqn and member.stepped and (parts := gradient_parts(zero, index)):
                return FlatTensor(member.shape, parts[0].dtype, _slices(parts, member))
    return None


def _gradient_shard(zero: Any, index: int, member: FlatMember) -> Tensor | None:
    parts = gradient_parts(zero, index)
    return torch.cat([parts[0].new_empty(0), *(s.data for s in _slices(parts, member))]) if parts else None


def _slices(parts: Sequence[Tensor], member: FlatMember) -> Iterator[FlatSlice]:
    """The slices of a member in tensors that follow one another as in the flat tensor."""
    begin = 0
    for part in parts:
        low = max(begin, member.offset)
        high = min(begin + part.numel(), member.offset + member.length)
        if low < high:
            data = part.detach().view(-1)[low - begin : high - begin]
            yield FlatSlice(data=data, start=member.start + low - member.offset)
        begin += part.numel()


def accumulated_gradients(
    zero: Any, groups: Sequence[FlatGroup], names: Mapping[Tensor, str]
) -> Iterator[tuple[str, LiveTensor]]:
    """FQN and gradient of each parameter in ``names`` that waits for further micro-batches: by stage this rank's own in
    full, a reduced shard, or a full one with a reduced part.
    """
    if optimizer_kind(zero) == BF16:
        for parameters, waiting in zip(zero.bf16_groups, zero.fp32_groups_gradients, strict=True):
            for parameter, gradient in zip(parameters, waiting, strict=True):
                yield names[parameter], gradient.view(parameter.shape)
        return
    wait_for_offloaded_gradients(zero)
    if optimizer_kind(zero) == STAGES_1_2 and not zero.partition_gradients:
        attribute = "grad_accum" if zero.use_grad_accum_attribute else "grad"
        for parameter, fqn in names.items():
            if (gradient := getattr(parameter, attribute)) is not None:
                yield fqn, gradient
        return
    for index, group in enumerate(groups):
        if optimizer_kind(zero) == STAGE_3:
            flat: Any = swapping.host_gradient(zero, index)
        elif zero._use_compact_grad_partition_buffer(index):
            # DeepSpeed accumulates in another dtype than it computes in.
            flat = getattr(zero.averaged_gradients.get(index), "flat_partition", None)
        else:
            yield from _full_sums(zero, index, names)
            continue
        for member in group.members if flat is not None else ():
            if member.stepped:
                yield member.fqn, FlatTensor(member.shape, flat.dtype, list(_slices([flat], member)))


def _full_sums(zero: Any, index: int, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """FQN and gradient of each parameter that this rank steps a part of. Only that part is reduced."""
    parameters = zero.params_in_partition[index]
    if not zero.cpu_offload:
        yield from zip(map(names.__getitem__, parameters), zero.all_grad_tensors.get(index) or [], strict=False)
        return
    for parameter in parameters:
        if (held := zero.accumulated_grads_in_cpu.get(zero.get_param_id(parameter))) is not None:
            yield names[parameter], held


def reduction_dtypes(engine: Any) -> set[torch.dtype]:
    """The dtypes in which DeepSpeed's ``engine`` sums gradients over ranks: two under its own autocast."""
    return set(getattr(engine.optimizer, "ipg_buckets", ())) or {engine.communication_data_type}


def complete_accumulated(zero: Any) -> None:
    """Complete the sums of stages 2 and 3, with parameters that ``toggle_optimizer`` froze in the last pass."""
    groups = zero.bit16_groups if optimizer_kind(zero) == STAGES_1_2 else []
    frozen = [parameter for group in groups for parameter in group if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        zero.finalize_gradient_accumulation_boundary()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def drop_gradients(zero: Any) -> None:
    """Drop the gradients of a step, taken or skipped. DeepSpeed would step on old ones of parameters without a new one,
    and under offload stages 1 and 2 would add to the gradients of a skipped step.
    """
    if optimizer_kind(zero) == STAGES_1_2:
        for index in zero.averaged_gradients:
            zero.averaged_gradients[index] = None
    if optimizer_kind(zero) == STAGE_3:
        zero.grad_partitions_flat_buffer.zero_()
    if steps_on_host(zero):
        for flat in flat_masters(zero):
            if flat.grad is not None:
                flat.grad.zero_()


def steps_on_host(zero: Any) -> bool:
    """Whether DeepSpeed's optimizer ``zero`` is offloaded."""
    kind = optimizer_kind(zero)
    return kind != BF16 and bool(zero.offload_optimizer if kind == STAGE_3 else zero.cpu_offload)


def wait_for_offloaded_gradients(zero: Any) -> None:
    """Wait for the copies to the host that a backward pass has begun (``copy_grads_in_partition``,
    ``_offload_grad_partition_at_boundary``). DeepSpeed waits in ``step`` in stages 1 and 2, and never in stage 3.
    """
    from deepspeed.accelerator import get_accelerator

    if steps_on_host(zero) and not get_accelerator().resolves_data_dependency():
        get_accelerator().synchronize()  # Stages 1 and 2 copy on a stream of their own.
