"""DeepSpeed's engine over a module: started, stepped and stopped by plain functions. Gradients are unscaled and clipped
in place by the caller; DeepSpeed's own clipping, loss scale and norms have nothing left to do.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines import after_backward
from lightning_shard.engines.torch_ddp import StepRoot
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero.offload import schedule_of
from lightning_shard.engines.zero.saved_weights import SavedWeights
from lightning_shard.engines.zero.scalars import Scalars
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import FlatGroup
from lightning_shard.tensors.tracing import tree_leaves


@dataclass(kw_only=True, eq=False)
class Running:
    """A running DeepSpeed engine, and what the steps around it need."""

    engine: Any  # ``deepspeed.DeepSpeedEngine``.
    stage: int
    # The user's optimizer, or the one that the configuration describes; its groups hold flat partitions.
    optimizer: Optimizer | None = None
    groups: list[FlatGroup] = field(default_factory=list)  # What this rank steps; empty without an optimizer.
    saved: SavedWeights | None = None  # Keeps gathered parameters out of autograd's graphs, in stage 3.
    scalars: Scalars | None = None  # 0-d parameters, as a module's code reads them.
    scheduler: Any = None  # The learning rate schedule that the configuration describes, to be stepped by the caller.
    pending: bool = False  # Whether a backward pass ran since the last step.
    inside: bool = False  # Whether a step is in the engine's forward.
    complete: bool = True  # Whether the last one was at an accumulation boundary: the gradients can be stepped on.
    foresees_steps: bool = True  # See `Run`.
    overflow: bool = False  # Whether the step to come is to be skipped, the same on every rank.

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around the user's."""
        return self.engine.optimizer


def start(
    module: nn.Module,
    *,
    optimizer: Optimizer | None,
    config: Mapping[str, Any],
    names: Mapping[Tensor, str],
    device: torch.device,
    foresees_steps: bool = True,
) -> Running:
    """Build DeepSpeed's engine around ``module``, after `process.connect`. All ranks call it. Parameters, with FQNs in
    ``names``, are plain and equal on all ranks, or sharded by ``deepspeed.zero.Init``. The groups of ``optimizer`` hold
    flat partitions afterwards; None: the one that ``config``, which is complete, describes, else none, for evaluation.
    """
    import deepspeed

    section = config.get("scheduler")
    before = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        # Else the device of index LOCAL_RANK (`DeepSpeedEngine._set_distributed_vars`).
        args=None if device.index is None else Namespace(device_rank=device.index),
        model=StepRoot(module),
        optimizer=optimizer,
        model_parameters=trainable if optimizer is None and "optimizer" in config else None,
        config=dict(config),
        # By itself it hands its own optimizer to a schedule of torch's, which takes torch's alone.
        lr_scheduler=section and partial(schedule_of, section),
        dist_init_required=False,
    )
    stage = int(config["zero_optimization"]["stage"])
    running = Running(engine=engine, stage=stage, scheduler=engine.lr_scheduler, foresees_steps=foresees_steps)
    set_boundary(running, True)
    engine.lr_scheduler = None
    # Else gradients of a module that runs backward itself are divided by the number of micro-batches twice.
    engine._backward_prologue_per_tensor = lambda gradient: gradient
    if stage == 3:
        replace_hooks(_offload_of(engine.optimizer), engine.device)
    if engine.basic_optimizer is not None:
        running.optimizer = engine.basic_optimizer
        swapping.show(engine.optimizer)
        running.groups = layout.with_frozen(layout.flat_groups(engine.optimizer, names), before, names)
        _take_over_steps(running)
        _show_masters(running, True)
        if stage == 3:
            running.saved = SavedWeights(module.parameters(), engine.module.ds_inflight_param_registry)
    return running


def _show_masters(running: Running, shown: bool) -> None:
    """Put the masters into the optimizer's groups, where what it writes outside of its step reaches them, as
    ScheduleFree does for evaluation; or take them out for a step of stage 3, of one sub-group with all others empty.
    """
    for settings in {id(group.group): group.group for group in running.groups}.values():
        settings["params"] = [group.flat for group in running.groups if shown and group.group is settings]


def _take_over_steps(running: Running) -> None:
    """Let the optimizer of ``running`` skip steps when told so, and compute no norm of its own."""
    zero = running.zero

    def no_norm(*args: Any, **kwargs: Any) -> Tensor:
        # Where there is no loss scale, DeepSpeed skips a step by its norm alone. On the host, where it looks at it: it
        # would wait for a device in each step.
        return torch.full((), math.inf if running.overflow else 0.0)

    if layout.kind(zero) == layout.BF16:
        # It asks for the gradients that its norm is of.
        zero.get_grads_for_norm = lambda for_clipping=False: ([no_norm().view(1)], {})
        return
    # It warns of an overflow where a step is skipped; the loss is scaled elsewhere.
    zero.loss_scaler.update_scale = lambda overflow: None
    zero.check_overflow = lambda partition_gradients=True: setattr(zero, "overflow", running.overflow)
    if layout.kind(zero) == layout.STAGE_3:
        zero.get_grad_norm_direct = zero.complete_grad_norm_calculation_for_cpu_offload = no_norm
        swapping.take_over(zero)
    else:
        _divide_sums(zero)
        if running.stage == 1 and zero.overlap_comm:
            zero.reduce_gradients = partial(_reduce_all, zero)
        zero.check_grad_overflow = True
        zero.scaled_global_norm = no_norm
        # It looks for an overflow, which is found elsewhere, in each offloaded gradient, and waits for it.
        zero.update_offload_overflow_tracker = lambda gradient: None


def _reduce_all(zero: Any, pipeline_parallel: bool = False) -> None:
    """End an accumulation of stage 1 with ``overlap_comm``. DeepSpeed's hooks reduce in a backward pass that is known
    to end one: none is in manual optimization, and none is called for a parameter that this pass does not use.
    """
    waiting = {number for bucket in zero.ipg_buckets.values() for *_, number in bucket.params}
    for index, group in enumerate(zero.bit16_groups):
        for parameter in group:
            number = zero.get_param_id(parameter)
            is_reduced = zero.params_already_reduced[number] or number in waiting
            if not is_reduced and zero.get_gradient_for_reduction(parameter) is not None:
                zero.reduce_ready_partitions_and_remove_grads(parameter, index)
    zero.overlapping_partition_gradients_reduce_epilogue()


def _divide_sums(zero: Any) -> None:
    """Let stage 2 divide what it has summed over ranks, in the dtype of the sum. It divides buckets in the compute
    dtype before (``average_tensor``), which 16 bits round where the number of ranks is no power of two.
    """
    average, allreduce = zero.average_tensor, zero.allreduce_bucket

    def average_tensor(tensor: Tensor, communication_data_type: torch.dtype) -> None:
        # Without reduce-scatter it casts first.
        zero.gradient_average = tensor.dtype == communication_data_type or not zero.reduce_scatter
        average(tensor, communication_data_type)
        zero.gradient_average = True

    def allreduce_bucket(*args: Any, **kwargs: Any) -> Tensor:
        summed: Tensor = allreduce(*args, **kwargs)
        return summed if zero.gradient_average else summed.div_(dist.get_world_size(zero.dp_process_group))

    if zero.gradient_average:
        zero.average_tensor, zero.allreduce_bucket = average_tensor, allreduce_bucket


def run(running: Running, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``step(*args, **kwargs)`` as the engine's forward: parameters are gathered for the modules in it."""
    running.inside = True
    try:
        with nullcontext() if running.saved is None else running.saved.dropped():
            return running.engine(step, *args, **kwargs)[0]
    finally:
        running.inside = False


def release(running: Running) -> None:
    """Release what gradients that stage 3 has taken inside of a step's forward left gathered; no backward follows."""
    _offload_of(running.zero).release_backward_leftovers()


def backward(running: Running, loss: Tensor, call: Callable[[Tensor], None] | None, **kwargs: Any) -> None:
    """Run backward from the scaled ``loss``, inside of `run` too; by ``call``, a module's own backward. All ranks call
    it.
    """
    engine = running.engine
    # Else it takes a backward of the module's own for one that its hooks are to end, which those of 16 bits in stage 1
    # never do.
    engine._running_engine_backward = True
    if running.inside:
        # DeepSpeed learns of a backward pass from the outputs of its forward, which do not exist yet.
        running.zero.clear_backward_seen_flag()
        engine._backward_prologue()
    if call is None:
        engine.backward(loss, scale_wrt_gas=False, **kwargs)
    else:
        try:
            call(loss)
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward = False
    # Whether it ended an accumulation.
    running.pending, running.complete = True, engine.is_gradient_accumulation_boundary()


def set_boundary(running: Running, enabled: bool) -> None:
    """Say whether the backward pass to come ends an accumulation, where that is known before the step."""
    running.engine.set_gradient_accumulation_boundary(enabled and running.foresees_steps)


def finish_accumulation(running: Running) -> None:
    """Complete gradients of backward passes of which the last was not known to be that. All ranks call it."""
    if not running.pending:
        return
    complete_backward(running)
    if running.scalars is not None:
        running.scalars.reduce(running.zero)


def complete_backward(running: Running) -> None:
    """Reduce what the last backward pass did not, as it was not known to be that."""
    if running.complete:
        return
    running.complete = True
    running.engine.set_gradient_accumulation_boundary(True)
    if running.stage >= 2:
        layout.complete_gradients(running.zero)
    else:
        running.engine.allreduce_gradients()


def step(running: Running, *, skip: bool) -> None:
    """Step, or drop the gradients, which are zero afterwards; forward sees the new parameters. All ranks call it.
    Without a backward pass since the last step there is nothing to do.
    """
    if not running.pending:
        return
    running.overflow = skip
    if running.stage == 3:
        layout.wait_for_gradients(running.zero)
        _show_masters(running, False)
    running.engine.step()
    layout.drop_gradients(running.zero)
    if running.saved is not None and not skip:
        running.saved.changed()
    swapping.show(running.zero)
    _show_masters(running, True)
    if running.scalars is not None and not skip:
        running.scalars.refresh()
    running.pending = running.overflow = False
    set_boundary(running, True)


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any] | None = None) -> Generator[None, None, None]:
    """Let DeepSpeed call ``step``, or nothing, in place of the user's optimizer's own."""
    own = vars(optimizer).get("step")
    # A new function, as what is wrapped stays with it, and a method, for which a schedule of torch's takes it.
    called = wraps(optimizer.step)(lambda _, *args, **kwargs: step and step(*args, **kwargs))
    vars(optimizer)["step"] = MethodType(called, optimizer)
    try:
        yield
    finally:
        del vars(optimizer)["step"]
        if own is not None:
            vars(optimizer)["step"] = own  # a schedule counts the steps there


@torch.no_grad()
def refresh(running: Running) -> None:
    """Let forward see masters, or parameter shards, that were changed from outside. All ranks call it."""
    zero = running.zero
    if running.scalars is not None:
        running.scalars.refresh()
    if running.stage < 3:
        zero.update_lp_params()
        return
    if running.saved is not None:
        running.saved.changed()
    swapping.notice_slots(zero)
    _offload_of(zero).partition_all_parameters()
    for index in range(len(running.groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        # They stay gathered.
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _offload_of(zero: Any) -> Any:
    """DeepSpeed's ``DeepSpeedZeRoOffload``, which gathers: without an optimizer it is in the place of one."""
    return getattr(zero, "parameter_offload", zero)


def stop(running: Running) -> None:
    """Take DeepSpeed's hooks, and its autocast's dtype, off the module and its parameters. No communication."""
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    if running.scalars is not None:
        running.scalars.close()
    swapping.release(running.zero, running.engine.module.parameters())
    for parameter in running.engine.module.parameters():
        vars(parameter).pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
    # DeepSpeed takes all state for dicts of parameters, but an optimizer may count there (MADGRAD).
    state = {} if running.optimizer is None else running.optimizer.state
    others = {key: state.pop(key) for key in [key for key, each in state.items() if not isinstance(each, dict)]}
    running.engine.destroy()
    state.update(others)


def replay_cpu_adam(optimizer: Optimizer, groups: Sequence[FlatGroup]) -> None:
    """Let the compiled part of a DeepSpeedCPUAdam count to the step that was loaded, over no elements: it multiplies
    powers of the betas up (``cpu_adam.h``, ``IncrementStep``), but takes ``pow`` after a gap, which rounds otherwise.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    stepped = [group for group in groups if optimizer.state.get(group.flat)]
    if kernel is None or not stepped:
        return
    number, first = optimizer.opt_id, optimizer.defaults  # type: ignore[attr-defined]
    kernel.destroy_adam(number)
    adamw = optimizer.adam_w_mode  # type: ignore[attr-defined]
    kernel.create_adam(number, first["lr"], *first["betas"], first["eps"], first["weight_decay"], adamw, False)
    last = [int(optimizer.state[group.flat]["step"]) for group in stepped]
    nothing = [torch.empty(0)] * 4
    for step in range(1, max(last) + 1):
        for group, end in zip(stepped, last, strict=True):
            if step <= end:
                settings = group.group
                rest = [settings[name] for name in ("eps", "weight_decay", "bias_correction")]
                kernel.adam_update(number, step, settings["lr"], *settings["betas"], *rest, *nothing)


def replace_hooks(offload: Any, device: torch.device) -> None:
    """Replace those hooks of ``offload``, a ``DeepSpeedZeRoOffload`` over a module on ``device``, that change results
    or fail: parameters in outputs without ``__dict__`` or string keys, and the end of backward (`after_backward`).
    """
    layout.trace_gathered(offload)
    _hook_once(offload.forward_hooks)
    _hook_once(offload.backward_hooks)
    for handle in offload.forward_hooks[1::2]:  # Each module has one before its forward and one after it.
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = partial(_after_forward, hooks[handle.id])
    for joins, marks in zip(offload.backward_hooks[::2], offload.backward_hooks[1::2], strict=True):
        backward = _Backward(offload, device)
        marks.hooks_dict_ref()[marks.id] = backward.begin_forward
        (takes_kwargs,) = marks.extra_dict_ref
        takes_kwargs()[marks.id] = True
        joins.hooks_dict_ref()[joins.id] = backward.end_forward


def _hook_once(handles: list[Any]) -> None:
    """Remove all but the first two hooks of each module: DeepSpeed sets two more for every other name that it has."""
    kept: dict[int, list[Any]] = {}
    for pair in zip(handles[::2], handles[1::2], strict=True):
        first = kept.setdefault(id(pair[0].hooks_dict_ref()), [*pair])
        if pair[0] is not first[0]:
            for handle in pair:
                handle.remove()
    handles[:] = [handle for pair in kept.values() for handle in pair]


class _Backward:
    """Gathers a module's parameters for each of its backward passes, and releases them after it: DeepSpeed does so once
    for each call of forward, but a gradient penalty goes through a module once more.
    """

    def __init__(self, offload: Any, device: torch.device) -> None:
        self._offload, self._device = offload, device
        self._begun: list[tuple[Tensor, after_backward.Given] | None] = []
        self._active = False

    def begin_forward(self, module: nn.Module, *inputs: Any) -> None:
        marked = after_backward.mark(partial(self._end, module), self._device)
        self._begun.append(None if marked is None else (marked, after_backward.given_tensors(inputs)))

    def end_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if (begun := self._begun.pop()) is None:
            return output
        marked, given = begun

        def join(tensor: Tensor) -> Tensor:
            joined: Any = after_backward.join(tensor, marked, partial(self._begin, module))
            if layout.is_partitioned(tensor):
                # By it DeepSpeed knows a parameter that modules return to each other.
                joined.ds_param_alias = tensor
            return joined

        return after_backward.replaced(output, given, join)

    def _begin(self, module: nn.Module) -> None:
        self._active = layout.gathers_for(module)
        if self._active:
            self._offload.pre_sub_module_backward_function(module)

    def _end(self, module: nn.Module) -> None:
        if self._active:
            self._active = False
            self._offload.post_sub_module_backward_function(module)


def _after_forward(hook: Callable[..., None], module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):  # of most modules, whose host time counts
        hook(module, inputs, [output])
        return
    values: Any = [output]  # In containers of these too, where DeepSpeed does not look.
    if output is not None and not isinstance(output, list | tuple):
        names = [f.name for f in fields(output)] if is_dataclass(output) else getattr(output, "__dict__", ())
        values = output.values() if isinstance(output, Mapping) else [getattr(output, name, None) for name in names]
    shown = [value for value in tree_leaves([*values]) if isinstance(value, Tensor)]
    looked_into = isinstance(output, list | tuple | dict) or is_dataclass(output)
    own = not looked_into and any(layout.is_partitioned(p) for p in module.parameters(recurse=False))
    if own and any(value.requires_grad for value in shown):
        raise ConfigurationError(
            f"{type(module).__name__} has parameters of its own and returns a {type(output).__name__}, in which no "
            "tensors are looked for, so that stage 3 would not gather the parameters in backward. Return a tensor, "
            "tuple, list, dict or dataclass, compute in a submodule such as nn.Linear, or use shard_fsdp."
        )
    hook(module, inputs, shown)
