"""DeepSpeed's engine over a module: started, stepped and stopped by plain functions.

Gradients are unscaled and clipped in place by the caller, between the end of an accumulation and the step; DeepSpeed's
own clipping, loss scale and norms have nothing left to do.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.engines.torch_ddp import StepRoot
from lightning_shard.engines.zero import hooks, layout, swapping
from lightning_shard.engines.zero.saved_weights import SavedWeights
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import FlatGroup
from lightning_shard.tensors.full import gather_full


@dataclass(kw_only=True, eq=False)
class Running:
    """A running DeepSpeed engine, and what the steps around it need."""

    engine: Any  # ``deepspeed.DeepSpeedEngine``.
    stage: int
    # The user's optimizer, or the one that the configuration describes; its groups hold flat partitions.
    optimizer: Optimizer | None = None
    groups: list[FlatGroup] = field(default_factory=list)  # What this rank steps; empty without an optimizer.
    saved: SavedWeights | None = None  # Keeps gathered parameters out of autograd's graphs, in stage 3.
    scheduler: Any = None  # The learning rate schedule that the configuration describes, to be stepped by the caller.
    pending: bool = False  # Whether a backward pass ran since the last step.
    complete: bool = True  # Whether the gradients are reduced and ready to be stepped on.
    overflow: bool = False  # Whether the step to come is to be skipped, the same on every rank.

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around the user's; the user's own in stage 0."""
        return self.engine.optimizer


def start(
    module: nn.Module,
    *,
    optimizer: Optimizer | None,
    config: Mapping[str, Any],
    names: Mapping[Tensor, str],
    device: torch.device,
) -> Running:
    """Build DeepSpeed's engine around ``module``. All ranks call it; `process.connect` was called before.

    Args:
        module: with plain parameters, equal on all ranks, or sharded by ``deepspeed.zero.Init``.
        optimizer: over the module's parameters; its groups hold flat partitions afterwards. None: the one that
            ``config`` describes, and else none, for evaluation.
        config: DeepSpeed's, complete.
        names: FQN of each parameter of ``module``.
        device: where this rank computes.
    """
    import deepspeed

    before = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        # Else the device of index LOCAL_RANK (`DeepSpeedEngine._set_distributed_vars`).
        args=None if device.index is None else Namespace(device_rank=device.index),
        model=StepRoot(module),
        optimizer=optimizer,
        model_parameters=trainable if optimizer is None and "optimizer" in config else None,
        config=dict(config),
        dist_init_required=False,
    )
    stage = int(config["zero_optimization"]["stage"])
    running = Running(engine=engine, stage=stage, scheduler=engine.lr_scheduler)
    engine.lr_scheduler = None
    if stage == 3:
        hooks.replace(getattr(engine.optimizer, "parameter_offload", engine.optimizer), engine.device)
    if engine.basic_optimizer is not None:
        running.optimizer = engine.basic_optimizer
        _leave_gradients_to_engine(running)
        if stage > 0:
            swapping.show(engine.optimizer)
            running.groups = layout.with_frozen(layout.flat_groups(engine.optimizer, names), before, names)
            _take_over_steps(running)
        if stage == 3:
            running.saved = SavedWeights(module.parameters(), engine.module.ds_inflight_param_registry)
    return running


def _leave_gradients_to_engine(running: Running) -> None:
    """The engine zeroes gradients after each step; the memory that they are offloaded to must stay."""

    def zero_grad(set_to_none: bool = True) -> None:
        if running.pending:
            raise ConfigurationError(
                "zero_grad was called between a backward pass and the optimizer's step, but DeepSpeed has reduced the "
                "gradients by then and can't drop them. Call it after the step, or not at all."
            )

    assert running.optimizer is not None
    running.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _take_over_steps(running: Running) -> None:
    """Let the optimizer of ``running`` skip steps when told so, and compute no norm of its own."""
    zero = running.zero

    def check_overflow(partition_gradients: bool = True) -> None:
        zero.overflow = running.overflow

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
    zero.check_overflow = check_overflow
    if layout.kind(zero) == layout.STAGE_3:
        zero._get_norm_groups = lambda: [no_norm()]
        swapping.take_over(zero)
    else:
        zero.check_grad_overflow = True
        zero.scaled_global_norm = no_norm
        # It looks for an overflow, which is found elsewhere, in each offloaded gradient, and waits for it.
        zero.update_offload_overflow_tracker = lambda gradient: None


def run(running: Running, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``step(*args, **kwargs)`` as the engine's forward: parameters are gathered for the modules in it."""
    with nullcontext() if running.saved is None else running.saved.dropped():
        (output,) = running.engine(step, *args, **kwargs)
    return output


def backward(running: Running, loss: Tensor, *, inside_forward: bool, **kwargs: Any) -> None:
    """Run backward from ``loss``, which is scaled already, also ``inside_forward`` of `run`. All ranks call it."""
    if inside_forward:
        # DeepSpeed learns of a backward pass from the outputs of its forward, which do not exist yet.
        running.engine._running_engine_backward = True
        running.engine._backward_prologue()
    running.engine.backward(loss, scale_wrt_gas=False, **kwargs)
    running.pending = True


def set_boundary(running: Running, enabled: bool) -> None:
    """Say whether the backward pass to come ends an accumulation."""
    running.complete = enabled
    running.engine.set_gradient_accumulation_boundary(enabled)


def finish_accumulation(running: Running) -> None:
    """Complete gradients of backward passes of which none was said to be the last. All ranks call it."""
    if running.complete or not running.pending:
        return
    set_boundary(running, True)
    if running.stage >= 2:
        running.zero.finalize_gradient_accumulation_boundary()
    else:
        running.engine.allreduce_gradients()


def step(running: Running, *, skip: bool) -> None:
    """Step, or drop the gradients; without a backward pass since the last step there is nothing to do.

    All ranks call it. Gradients are zero afterwards, and forward sees the new parameters.
    """
    if not running.pending:
        return
    running.overflow = skip
    if running.groups:
        layout.wait_for_gradients(running.zero)
    # Stage 0 has no word for a skipped step.
    with replaced_step(running.zero, step_nothing) if skip and running.stage == 0 else nullcontext():
        running.engine.step()
    if running.groups:
        layout.drop_gradients(running.zero)
    if running.saved is not None and not skip:
        running.saved.changed()
    swapping.show(running.zero)
    running.pending = running.overflow = False
    set_boundary(running, True)


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any]) -> Generator[None, None, None]:
    """Let DeepSpeed call ``step`` in place of the user's optimizer's own."""
    own = vars(optimizer).get("step")
    vars(optimizer)["step"] = wraps(optimizer.step)(step)
    try:
        yield
    finally:
        del vars(optimizer)["step"]
        if own is not None:
            # A schedule counts the steps there.
            vars(optimizer)["step"] = own


def step_nothing(*args: Any, **kwargs: Any) -> None:
    """For `replaced_step`."""


@torch.no_grad()
def refresh(running: Running) -> None:
    """Let forward see masters, or parameter shards, that were changed from outside. All ranks call it."""
    zero = running.zero
    if running.stage < 3:
        zero.update_lp_params()
        return
    if running.saved is not None:
        running.saved.changed()
    if running.groups:
        swapping.notice_slots(zero)
        zero._partition_all_parameters()
        for index in range(len(running.groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
    else:
        zero.partition_all_parameters()
    if zero.persistent_parameters:
        # They stay gathered.
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


@torch.no_grad()
def make_full(running: Running, parameters: Mapping[str, nn.Parameter], *, device: torch.device) -> None:
    """Give parameters that are not sharded the masters' full values, on the host. All ranks call it, stages 1 and 2."""
    for fqn, live in layout.masters(running.groups).items():
        parameters[fqn].data = gather_full(live, device=device).cpu()


def stop(running: Running) -> None:
    """Take DeepSpeed's hooks off the module and its parameters. No communication."""
    if running.optimizer is not None:
        vars(running.optimizer).pop("zero_grad", None)
    swapping.release(running.zero, running.engine.module.parameters())
    running.engine.destroy()
