"""The one importer of torch's private FSDP2 objects, except for repairs of versions before 2.15."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, _fully_shard, fully_shard
from torch.utils.hooks import RemovableHandle

from lightning_shard.engines import _fsdp2_before_2_15 as before_2_15
from lightning_shard.engines.after_backward import Given, given_tensors, join, mark, replaced
from lightning_shard.precision.casting import in_backward
from lightning_shard.private_names import require, wrap

require(_fully_shard, "_fsdp_param_group _fsdp_state")
_groups, _states = _fully_shard._fsdp_param_group, _fully_shard._fsdp_state
TrainingState = _groups.TrainingState

require(_states.FSDPState, "_fsdp_param_group _mp_policy _modules_to_run_forward _state_ctx")
require(_states.FSDPState, "_pre_forward_hook_handle _post_forward_hook_handle", assigned="_training_state")
require(_states.FSDPState, assigned="_register_pre_backward_hook")
require(_states.FSDPStateContext, assigned="iter_forward_root")
require(_groups.FSDPMeshInfo, assigned="reduce_scatter_process_group")
require(_groups.FSDPParamGroup, "device fsdp_params mesh_info modules reshard")
require(_groups.FSDPParamGroup, assigned="_register_post_backward_hook _training_state post_backward post_forward")
require(_groups.FSDPParamGroup, assigned="pre_backward reshard_after_backward unshard wait_for_unshard")
require(_groups.FSDPParam, "all_gather_outputs offload_to_cpu sharded_param unsharded_accumulated_grad unsharded_param")
require(_groups.FSDPParam, "_sharded_post_forward_param sharded_state")
if before_2_15.IS_NEEDED:
    require(_groups.FSDPParamGroup, "lazy_init")
    require(_groups.FSDPParam, "reduce_dtype", assigned="unsharded_accumulated_grad")


def units_of(root: nn.Module) -> list[Any]:
    """The FSDP modules of ``root``, itself included, in the order of registration."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def gather(module: FSDPModule) -> None:
    """Gather ``module``'s own unit. The public ``unshard`` forgets the gradients' dtype if all is frozen now."""
    if (group := _group_of(module)) is not None:
        group.unshard()
        group.wait_for_unshard()


class Units:
    """The units of a sharded tree, listed once so that no step walks its modules."""

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._states = list(dict.fromkeys(map(_state_of, units)))
        self._groups = [group for state in self._states if (group := state._fsdp_param_group) is not None]

    def reshard(self) -> None:
        """Reshard every unit, without communication. An evaluation forward leaves the root's parameters gathered. So
        does torch with a unit of several modules if only some of them have run, and its values would be stale later.
        """
        for state in self._states:
            if waiting := state._modules_to_run_forward:
                waiting.clear()
                state._training_state = TrainingState.IDLE
                if state._fsdp_param_group is not None:
                    state._fsdp_param_group._training_state = TrainingState.IDLE
                if (shared := state._state_ctx).iter_forward_root is state:
                    shared.iter_forward_root = None
        for group in self._groups:
            group.reshard()

    def finish_gathers(self) -> None:
        """End prefetched gathers of units that did not run, which would later run on stale values."""
        for group in self._groups:
            group.wait_for_unshard()

    def reshard_after_backward(self, enabled: bool) -> None:
        """Set for every unit whether its parameters are freed after its backward pass."""
        for group in self._groups:
            group.reshard_after_backward = enabled


def leave_out_nested(module: FSDPModule, depth: str) -> None:
    """Skip FSDP's hooks in a call of ``module`` that is nested in another one, as counted by its attribute ``depth``.
    The hook at the end of the inner call would reshard under the outer one.
    """
    state = _state_of(module)
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        if type(handle) is RemovableHandle:  # a unit of several modules has handles of another type
            hooks = handle.hooks_dict_ref()
            assert hooks is not None
            hooks[handle.id] = partial(_unless_nested, vars(module), depth, hooks[handle.id])


def _unless_nested(attributes: Mapping[str, Any], depth: str, hook: Callable[..., Any], *arguments: Any) -> Any:
    return None if attributes[depth] > 1 else hook(*arguments)


def expect_gradients(root: nn.Module) -> None:
    """Give units with only frozen parameters the dtypes of a reduction, in case they are thawed."""
    for group in _groups_of(root) if before_2_15.IS_NEEDED else ():
        before_2_15.expect_gradients(group)


def reduce_over(root: nn.Module, group: ProcessGroup) -> None:
    """Reduce all units' gradients over ``group``. torch's own setting makes a group per run, with torch's timeout."""
    for unit in _groups_of(root):
        unit.mesh_info.reduce_scatter_process_group = group


def leave_inputs_alone(module: FSDPModule, before: Callable[[], None]) -> None:
    """Detect the end of the backward pass of ``module``'s unit by `after_backward` in place of nodes on its inputs.
    ``module`` is not the root. ``before`` is called when a backward pass begins.
    """
    if (group := _group_of(module)) is None:
        return
    marks: list[tuple[Tensor, Given]] = []
    own: list[Tensor] = []

    def mark_forward(args: Any, kwargs: Any) -> Any:
        marked = mark(group.post_backward, group.device)
        marks[:] = [] if marked is None else [(marked, given_tensors((args, kwargs)))]
        return args, kwargs

    def join_outputs(post_forward: Callable[..., Any], *args: Any) -> Any:
        output = post_forward(*args)
        if not marks:
            return output
        marked, given = marks.pop()

        def join_own(tensor: Tensor) -> Tensor:
            own.append(joined := join(tensor, marked, before))
            return joined

        return replaced(output, given, join_own)

    def hook_own(register: Callable[..., Any], output: Any) -> Any:
        # Without tensors that the module only returns: their gradient would gather the unit again after its backward.
        register(own)
        own.clear()
        return output

    group._register_post_backward_hook = mark_forward
    wrap(group, "post_forward", join_outputs)
    wrap(_state_of(module), "_register_pre_backward_hook", hook_own)


def dtypes_of(module: FSDPModule) -> tuple[torch.dtype, torch.dtype]:
    """The compute and the reduction dtype of ``module``'s unit for fp32 parameters."""
    mp_policy = _state_of(module)._mp_policy
    compute = mp_policy.param_dtype or torch.float32
    return compute, mp_policy.reduce_dtype or (compute if before_2_15.IS_NEEDED else torch.float32)


def reduction_dtypes(root: nn.Module) -> set[torch.dtype]:
    """The dtypes in which ``root``'s units with trainable parameters reduce gradients."""
    groups = ((module, _group_of(module)) for module in units_of(root))
    return {dtypes_of(m)[1] for m, g in groups if g and any(p.sharded_param.requires_grad for p in g.fsdp_params)}


def round_each_use(root: nn.Module) -> None:
    """Round each use's gradient of a gathered parameter to the compute dtype and sum the uses of one backward pass in
    it, as a loop with ``parameter.to(dtype)`` and DeepSpeed do. Sums over micro-batches have the reduction's dtype.

    Before torch 2.15 autograd does so, because the gathered parameter has the compute dtype. From 2.15 on FSDP sets its
    ``grad_dtype`` to None or to the dtype of the reduction (``FSDPParamGroup._set_unsharded_grad_dtypes``), which does
    not round the gradient of an fp32 use. It also keeps the sum over micro-batches in ``grad``, whose dtype must be
    ``grad_dtype``. So the sum is set aside while a graph of this unit may run backward.
    """
    for module in () if before_2_15.IS_NEEDED else units_of(root):
        compute, reduce = dtypes_of(module)
        group = _group_of(module)
        if group is None or compute == reduce or _SUMS in vars(group):
            continue
        sums: dict[Any, Tensor | None] = {}
        vars(group)[_SUMS] = sums
        wrap(group, "wait_for_unshard", partial(_set_sums_aside, group, sums))
        wrap(group, "pre_backward", partial(_set_sums_aside, group, sums))
        wrap(group, "post_backward", partial(_add_to_sums, sums))


_SUMS = "_shard_sums"


def _set_sums_aside(
    group: Any, sums: dict[Any, Tensor | None], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    call(*args, **kwargs)
    if not (torch.is_grad_enabled() or in_backward()):
        return
    for parameter in group.fsdp_params:
        full = _full(parameter)
        if full is None or not full.requires_grad or full.grad_dtype == full.dtype:
            continue
        if parameter not in sums:
            sums[parameter], full.grad = full.grad, None
        full.grad_dtype = full.dtype


def _add_to_sums(sums: dict[Any, Tensor | None], post_backward: Callable[..., Any], *args: Any) -> Any:
    for parameter, before in sums.items():
        full = _full(parameter)
        new, full.grad = full.grad, None
        full.grad_dtype = None
        full.grad = new if before is None else before if new is None else before.add_(new)
    sums.clear()
    return post_backward(*args)


def _sum_so_far(group: Any, parameter: Any) -> Tensor | None:
    """The full unreduced gradient of a parameter: the whole sum, or its sum over earlier micro-batches."""
    aside: Tensor | None = vars(group).get(_SUMS, {}).get(parameter)
    return parameter.unsharded_accumulated_grad if aside is None else aside


def accumulated_gradients(root: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Shard and gradient for each gradient of ``root``'s units that waits for further micro-batches: full ones of
    gathered units, and reduced shards.
    """
    for group, parameter in [(each, p) for each in _groups_of(root) for p in each.fsdp_params]:
        shard, full = parameter.sharded_param, _full(parameter)
        if shard.grad is not None:
            yield shard, shard.grad
        gradient = _sum_so_far(group, parameter)
        if gradient is None and full is not None:
            gradient = full.grad
        if gradient is not None:
            yield shard, gradient


def begin_sums(root: nn.Module, wanted: Set[nn.Parameter]) -> None:
    """Start the sums over micro-batches for ``wanted`` shards in each unit that has other sums, if torch reduces only
    gradients of one dtype.
    """
    for group in _groups_of(root) if before_2_15.IS_NEEDED else ():
        before_2_15.begin_sums(group, wanted)


def reduce_always(root: nn.Module, enabled: bool) -> None:
    """Make units reduce zeros for parameters without a gradient, so that all ranks reduce the same parameters."""
    for unit in units_of(root):
        unit.set_reduce_scatter_unused_params(enabled, recurse=False)


def watch_gradients(root: nn.Module, note: Callable[[nn.Parameter], None]) -> Callable[[], None]:
    """Call ``note`` with the shard of each parameter that has a gradient when its unit reduces or accumulates it.
    Returns the undo.
    """
    before = [(group, group.post_backward) for group in _groups_of(root)]
    for group, post_backward in before:
        group.post_backward = partial(_note_gradients, group, note, post_backward)

    def undo() -> None:
        for group, post_backward in before:
            group.post_backward = post_backward

    return undo


def _note_gradients(group: Any, note: Callable[[Any], None], post_backward: Callable[..., Any], *args: Any) -> Any:
    for parameter in group.fsdp_params:
        full = _full(parameter)
        if full is not None and full.grad is not None:
            note(parameter.sharded_param)
    return post_backward(*args)


def gathered_tensors(root: nn.Module) -> Iterator[Tensor]:
    """The tensors that ``root``'s units gather parameters into. They have no memory while resharded."""
    for parameter in _parameters_below(root):
        yield from parameter.all_gather_outputs
        if (full := _full(parameter)) is not None:
            yield full
        # With an integer `reshard_after_forward` the shard over fewer ranks, while there is one.
        if (shard := getattr(parameter, "_sharded_post_forward_param", None)) is not None:
            yield shard


def full_parameters(module: FSDPModule) -> Iterator[tuple[Any, Tensor, Any]]:
    """Shard, full parameter and FSDP's object, for each parameter of ``module``'s unit that was gathered before."""
    group = _group_of(module)
    for parameter in [] if group is None else group.fsdp_params:
        if (full := _full(parameter)) is not None:
            yield parameter.sharded_param, full, parameter


def gathered_parameters(module: FSDPModule) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Shard, gathered parameter and its padded 1-D all-gather output, if ``module``'s unit is gathered now."""
    for shard, full, parameter in full_parameters(module):
        outputs = parameter.all_gather_outputs
        if parameter.sharded_state.name == "UNSHARDED" and len(outputs) == 1:
            yield shard, full, outputs[0]


def sharded_parameters(root: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The shards of all units of ``root``, gathered or not, and whether FSDP offloads each to the host."""
    return ((parameter.sharded_param, parameter.offload_to_cpu) for parameter in _parameters_below(root))


def _full(parameter: Any) -> Any:
    """The full parameter, or None before the first gather."""
    return getattr(parameter, "unsharded_param", None)


def _state_of(module: FSDPModule) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _group_of(module: FSDPModule) -> Any:
    """The parameter group of ``module``'s unit, or None if it has no parameters."""
    return _state_of(module)._fsdp_param_group


def _groups_of(root: nn.Module) -> Iterable[Any]:
    return dict.fromkeys(filter(None, map(_group_of, units_of(root))))


def _parameters_below(root: nn.Module) -> Iterator[Any]:
    return (parameter for group in _groups_of(root) for parameter in group.fsdp_params)
