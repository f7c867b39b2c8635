"""DeepSpeed's engine over a module, without its own clipping, loss scale and norms."""

import math
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.torch_ddp import StepRoot
from lightning_shard.engines.zero import flat_layout, swapping
from lightning_shard.engines.zero.gather_hooks import replace_gather_hooks
from lightning_shard.engines.zero.offload import make_schedule
from lightning_shard.engines.zero.saved_weights import SavedWeights
from lightning_shard.engines.zero.scalars import ScalarLeaves
from lightning_shard.tensors.flat import FlatGroup


@dataclass(kw_only=True, eq=False)
class RunningEngine:
    """A started DeepSpeed engine and the state of its steps. All ranks call each method, in one order."""

    engine: Any  # ``deepspeed.DeepSpeedEngine``.
    stage: int
    # The user's optimizer, or made of the configuration's section. Its groups hold flat partitions.
    optimizer: Optimizer | None = None
    groups: list[FlatGroup] = field(default_factory=list)  # This rank's masters. Empty without an optimizer.
    saved_weights: SavedWeights | None = None  # In stage 3.
    scalars: ScalarLeaves | None = None  # If there are 0-d parameters in 16 bits.
    scheduler: Any = None  # The schedule of the configuration's section, which the caller steps.
    pending: bool = False  # Whether a backward pass ran since the last step.
    inside: bool = False  # Whether a step is in the engine's forward.
    complete: bool = True  # Whether the last backward pass was at an accumulation boundary, so that a step can follow.
    foresees_steps: bool = True  # See `Run`.
    overflow: bool = False  # Whether to skip the next step, the same on every rank.

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around the user's."""
        return self.engine.optimizer

    @property
    def offload(self) -> Any:
        """DeepSpeed's ``DeepSpeedZeRoOffload``, which gathers. Without an optimizer it takes the place of one."""
        return getattr(self.zero, "parameter_offload", self.zero)

    def run_forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``step(*args, **kwargs)`` as the engine's forward, in which modules gather their parameters."""
        self.inside = True
        try:
            with nullcontext() if self.saved_weights is None else self.saved_weights.save_positions():
                return self.engine(step, *args, **kwargs)[0]
        finally:
            self.inside = False

    def run_backward(self, loss: Tensor, call: Callable[[Tensor], None] | None, **kwargs: Any) -> None:
        """Run backward from the scaled ``loss``, inside of `run_forward` too. ``call``: the module's own backward."""
        engine = self.engine
        # By default DeepSpeed expects its hooks to end a module's own backward, which never happens in stage 1 in
        # 16 bits.
        engine._running_engine_backward = True
        if self.inside:
            # DeepSpeed recognizes a backward pass by the outputs of its forward, which do not exist yet.
            self.zero.clear_backward_seen_flag()
            engine._backward_prologue()
        if call is None:
            engine.backward(loss, scale_wrt_gas=False, **kwargs)
        else:
            try:
                call(loss)
                engine._backward_epilogue()
            finally:
                engine._running_engine_backward = False
        self.pending, self.complete = True, engine.is_gradient_accumulation_boundary()

    def set_boundary(self, enabled: bool) -> None:
        """Set whether the next backward pass ends an accumulation, if that is known before the step."""
        self.engine.set_gradient_accumulation_boundary(enabled and self.foresees_steps)

    def complete_gradients(self) -> None:
        """At the accumulation boundary: reduce the rest of the gradients if backward could not foresee the step."""
        if not self.pending:
            return
        if not self.complete:
            self.complete = True
            self.engine.set_gradient_accumulation_boundary(True)
            if self.stage >= 2:
                flat_layout.complete_accumulated(self.zero)
            else:
                self.engine.allreduce_gradients()
        if self.scalars is not None:
            self.scalars.reduce_gradients(self.zero)

    def step_masters(self, *, skip: bool) -> None:
        """Step, or drop the gradients, if a backward pass ran since the last step. Gradients are zero afterwards."""
        if not self.pending:
            return
        self.overflow = skip
        if self.stage == 3:
            flat_layout.wait_for_offloaded_gradients(self.zero)
            self.put_masters_in_groups(False)
        self.engine.step()
        flat_layout.drop_gradients(self.zero)
        if self.saved_weights is not None and not skip:
            self.saved_weights.note_new_values()
        if self.stage == 3:
            swapping.map_swapped_state(self.zero)
            self.put_masters_in_groups(True)
        if self.scalars is not None and not skip:
            self.scalars.refresh_leaves()
        self.pending = self.overflow = False
        self.set_boundary(True)

    def put_masters_in_groups(self, enabled: bool) -> None:
        """In stage 3: put the masters into the optimizer's groups, or take them out. An optimizer such as ScheduleFree
        also writes them for evaluation, outside of its step. A step is of one sub-group, with all others empty.
        """
        for settings in {id(group.group): group.group for group in self.groups}.values():
            settings["params"] = [group.flat for group in self.groups if enabled and group.group is settings]

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Let forward see masters, or parameter shards, that were written from outside."""
        zero = self.zero
        if self.scalars is not None:
            self.scalars.refresh_leaves()
        if self.stage < 3:
            zero.update_lp_params()
            return
        if self.saved_weights is not None:
            self.saved_weights.note_new_values()
        swapping.register_slots(zero)
        self.offload.partition_all_parameters()
        for index in range(len(self.groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            # They stay gathered.
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def stop(self) -> None:
        """Take DeepSpeed's hooks, and its autocast's dtype, off the module and its parameters. No communication."""
        from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

        if self.scalars is not None:
            self.scalars.restore_parameters()
        swapping.release_files(self.zero, self.engine.module.parameters())
        for parameter in self.engine.module.parameters():
            vars(parameter).pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
        # DeepSpeed expects a dict for each key of the state, but an optimizer may count steps there (MADGRAD).
        state = {} if self.optimizer is None else self.optimizer.state
        others = {key: state.pop(key) for key in [key for key, each in state.items() if not isinstance(each, dict)]}
        self.engine.destroy()
        state.update(others)


def start_engine(
    module: nn.Module,
    *,
    optimizer: Optimizer | None,
    config: Mapping[str, Any],
    names: Mapping[Tensor, str],
    device: torch.device,
    foresees_steps: bool = True,
) -> RunningEngine:
    """Build DeepSpeed's engine around ``module``, after `connect_deepspeed`. All ranks call it.

    Parameters, with FQNs in ``names``, are plain and equal on all ranks, or sharded by ``deepspeed.zero.Init``. Without
    ``optimizer`` the section of ``config`` makes it. Without a section the engine is for evaluation.
    """
    import deepspeed

    section = config.get("scheduler")
    before = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        # By default DeepSpeed takes the device of index LOCAL_RANK (`DeepSpeedEngine._set_distributed_vars`).
        args=None if device.index is None else Namespace(device_rank=device.index),
        model=StepRoot(module),
        optimizer=optimizer,
        model_parameters=trainable if optimizer is None and "optimizer" in config else None,
        config=dict(config),
        # By itself DeepSpeed gives its own optimizer to a schedule of torch, which refuses it.
        lr_scheduler=section and partial(make_schedule, section),
        dist_init_required=False,
    )
    stage = int(config["zero_optimization"]["stage"])
    running = RunningEngine(engine=engine, stage=stage, scheduler=engine.lr_scheduler, foresees_steps=foresees_steps)
    running.set_boundary(True)
    engine.lr_scheduler = None
    # DeepSpeed divides by the number of micro-batches twice if a module runs backward itself.
    engine._backward_prologue_per_tensor = lambda gradient: gradient
    if stage == 3:
        replace_gather_hooks(running.offload, engine.device)
    if engine.basic_optimizer is not None:
        running.optimizer = engine.basic_optimizer
        swapping.map_swapped_state(engine.optimizer)
        running.groups = flat_layout.add_frozen(flat_layout.flat_groups(engine.optimizer, names), before, names)
        _replace_norms_and_skips(running)
        if stage == 3:
            running.put_masters_in_groups(True)
            running.saved_weights = SavedWeights(module.parameters(), engine.module.ds_inflight_param_registry)
    return running


def _replace_norms_and_skips(running: RunningEngine) -> None:
    """Let DeepSpeed's optimizer skip a step if ``running.overflow`` says so, and compute no norm."""
    zero = running.zero

    def no_norm(*args: Any, **kwargs: Any) -> Tensor:
        # Without a loss scale DeepSpeed skips a step by its norm alone. On the host: DeepSpeed reads it, and would wait
        # for a device in each step.
        return torch.full((), math.inf if running.overflow else 0.0)

    if flat_layout.optimizer_kind(zero) == flat_layout.BF16:
        # It asks for the gradients of its norm.
        zero.get_grads_for_norm = lambda for_clipping=False: ([no_norm().view(1)], {})
        return
    # DeepSpeed warns of an overflow in a skipped step. This package scales the loss.
    zero.loss_scaler.update_scale = lambda overflow: None
    zero.check_overflow = lambda partition_gradients=True: setattr(zero, "overflow", running.overflow)
    if flat_layout.optimizer_kind(zero) == flat_layout.STAGE_3:
        zero.get_grad_norm_direct = zero.complete_grad_norm_calculation_for_cpu_offload = no_norm
        swapping.keep_gradients_in_memory(zero)
    else:
        _divide_after_sum(zero)
        if running.stage == 1 and zero.overlap_comm:
            zero.reduce_gradients = partial(_reduce_stage_1, zero)
        zero.check_grad_overflow = True
        zero.scaled_global_norm = no_norm
        # It searches each offloaded gradient for an overflow, and waits for it. Overflows are found elsewhere.
        zero.update_offload_overflow_tracker = lambda gradient: None


def _reduce_stage_1(zero: Any, pipeline_parallel: bool = False) -> None:
    """End an accumulation of stage 1 with ``overlap_comm``. DeepSpeed's hooks reduce in a backward pass that is known
    to end one: in manual optimization none is, and no hook runs for a parameter that this pass does not use.
    """
    waiting = {number for bucket in zero.ipg_buckets.values() for *_, number in bucket.params}
    for index, group in enumerate(zero.bit16_groups):
        for parameter in group:
            number = zero.get_param_id(parameter)
            is_reduced = zero.params_already_reduced[number] or number in waiting
            if not is_reduced and zero.get_gradient_for_reduction(parameter) is not None:
                zero.reduce_ready_partitions_and_remove_grads(parameter, index)
    zero.overlapping_partition_gradients_reduce_epilogue()


def _divide_after_sum(zero: Any) -> None:
    """Let stage 2 divide sums over ranks, in the dtype of the sum. DeepSpeed divides buckets before, in the compute
    dtype (``average_tensor``), which rounds in 16 bits unless the number of ranks is a power of two.
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


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any] | None = None) -> Generator[None, None, None]:
    """Let DeepSpeed call ``step``, or nothing, instead of the optimizer's own step."""
    own = vars(optimizer).get("step")
    # A new function each time, because wrappers stay on it. A method, because torch's schedules expect one.
    called = wraps(optimizer.step)(lambda _, *args, **kwargs: step and step(*args, **kwargs))
    vars(optimizer)["step"] = MethodType(called, optimizer)
    try:
        yield
    finally:
        del vars(optimizer)["step"]
        if own is not None:
            vars(optimizer)["step"] = own  # A schedule counts steps there.


def replay_cpu_adam(optimizer: Optimizer, groups: Sequence[FlatGroup]) -> None:
    """Let the compiled part of a DeepSpeedCPUAdam count to the loaded step, over no elements. It multiplies powers of
    the betas up (``cpu_adam.h``, ``IncrementStep``), but after a gap takes ``pow``, which rounds otherwise.
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
