"""Facts of a Trainer for a run's parts, comparisons of ranks before a fit, and replaced calls of Lightning."""

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard._lightning import Replacements, callbacks, loaders, loops
from lightning_shard._lightning.callbacks import HeldSaves
from lightning_shard.callbacks.ema import EMACallback
from lightning_shard.checkpoint.load import OpenCheckpoint
from lightning_shard.engines.engine import Engine, PlannedRun, Run, TrainerFacts
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.errors import ConfigurationError, PrecisionContractError
from lightning_shard.precision.casting import widen_statistics
from lightning_shard.ranks import Ranks
from lightning_shard.run.averaging import Averaging
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.nonfinite import roll_back_if_due
from lightning_shard.run.preemption_save import Preemption, RunIdentity, checkpoint_folders
from lightning_shard.run.run_memory import RunMemory
from lightning_shard.versions import newer_than_tested, tested


def run_of(trainer: Trainer, planned: PlannedRun, device: torch.device, mesh: DeviceMesh) -> Run:
    """Make the `Run` of a Trainer, for an engine. All ranks call it."""

    def total_steps() -> int | None:
        steps = trainer.estimated_stepping_batches
        return int(steps) if math.isfinite(steps) and steps > 0 else None

    module = trainer.lightning_module
    if trainer.state.fn == TrainerFn.FITTING:
        rank_zero_info(_summary(trainer, planned, mesh))
    return Run(
        planned=planned,
        device=device,
        mesh=mesh,
        seed=int(Ranks.of().broadcast(torch.initial_seed())),
        fitting=trainer.state.fn == TrainerFn.FITTING,
        automatic=module.automatic_optimization,
        # Manual steps, and an own `optimizer_step`, may let batches pass without a step.
        foresees_steps=module.automatic_optimization and not is_overridden("optimizer_step", module),
        trainer=TrainerFacts(
            micro_batch_size=loaders.train_batch_size(trainer),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm"),
            total_steps=total_steps,
        ),
    )


def _summary(trainer: Trainer, planned: PlannedRun, mesh: DeviceMesh) -> str:
    parameters = [p for p in trainer.lightning_module.parameters() if not is_lazy(p)]  # engines refuse lazy ones
    # Parameters of ZeRO-3 are empty. DTensors have their full size.
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if not p.requires_grad)
    axes = dict(zip(mesh.mesh_dim_names or (), map(str, mesh.shape), strict=True))
    precision = planned.precision + " aligned" * planned.aligned
    text = f"{type(trainer.strategy).__name__}: {' x '.join(axes.values())} ranks ({' x '.join(axes)}), {precision}"
    return f"{text}, {numel:,} parameters" + f", {frozen:,} of them frozen" * bool(frozen)


_COMPARED = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "val_check_interval")
_PLAIN = (str, int, float, bool, type(None), tuple)


def compared_settings(strategy: object, settings: Mapping[str, Any], trainer: Trainer) -> dict[str, str]:
    """Settings of the ``strategy`` and the Trainer, and hyperparameters, that must be equal on all ranks."""
    found = {"strategy": type(strategy).__name__, "precision": str(trainer.precision)}
    found |= {f"strategy.{name}": repr(value) for name, value in settings.items()}
    found |= {f"trainer.{name}": repr(getattr(trainer, name, None)) for name in _COMPARED}
    found["trainer.default_root_dir"] = os.path.abspath(str(trainer.default_root_dir))
    module = trainer.lightning_module
    found["model"] = type(module).__qualname__
    hparams = dict(getattr(module, "hparams", {}))
    return found | {f"model.{name}": repr(value) for name, value in hparams.items() if isinstance(value, _PLAIN)}


def before_sharding(trainer: Trainer, module: LightningModule, layer_sync: Any) -> None:
    """Call ``before_sharding`` of callbacks and insert synchronised batch norms, while parameters are full."""
    if layer_sync is not None:
        layer_sync.apply(module)
    for callback in callbacks.callbacks_of(trainer):
        if (hook := getattr(callback, "before_sharding", None)) is not None:
            hook(trainer, module)


def make_contiguous(module: LightningModule) -> None:
    """Make every parameter contiguous, as shards are: strides change rounding. 16-bit statistics become fp32."""
    widen_statistics(module)
    for parameter in (p for p in module.parameters() if p.layout == torch.strided and not is_lazy(p)):
        # `is_contiguous` ignores dims of size 1, but kernels do not.
        if parameter.stride() != torch.empty(parameter.shape, device="meta").stride():
            parameter.data = parameter.data.contiguous().flatten().view(parameter.shape)


def begin_batch(trainer: Trainer, engine: Engine, buffers: SharedBuffers) -> None:
    """Before a training batch that begins a step, give all ranks rank 0's buffers, as DDP does, and drop the last
    step's gradients, which would lie in memory during forward. All ranks call it.
    """
    automatic = trainer.lightning_module.automatic_optimization
    if automatic and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return  # Lightning drops no gradients in this batch either.
    if engine.shares_buffers:
        buffers.share()
    if automatic and not callbacks.watches_zero_grad(trainer):
        engine.free_gradients()


def same_on_all_ranks(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Return ``optimizers``. All ranks call it. ConfigurationError: settings that differ between ranks."""
    own = "; ".join(f"{type(o).__qualname__}: {', '.join(map(_shown_group, o.param_groups))}" for o in optimizers)
    each = Ranks.of().gather(own)
    if other := next((rank for rank, text in enumerate(each) if text != each[0]), None):
        first = (i for i, (a, b) in enumerate(zip(each[0], each[other], strict=False)) if a != b)
        start = max(next(first, 0) - 60, 0)
        raise ConfigurationError(
            f"configure_optimizers makes other optimizers on rank {other} than on rank 0: "
            f"...{each[other][start : start + 120]} and ...{each[0][start : start + 120]}. Ranks step shards of "
            "the same parameters: derive hyperparameters from values that are the same on every rank."
        )
    return optimizers


def _shown_group(group: Mapping[str, Any]) -> str:
    # Objects that print an address differ on every rank.
    plain = {**group, "params": len(group["params"])}
    shown = {key: value if isinstance(value, (*_PLAIN, list)) else type(value) for key, value in plain.items()}
    return ", ".join(f"{key} is {value}" for key, value in shown.items())


_passed: set[str] = set()  # Checked in this process, by strategy and precision.


def check_untested_versions(checked: str, check: Callable[[], str], *, aligned: bool) -> None:
    """Compare an engine with a plain loop, once in a process, if a library is newer than the tests. All ranks call it
    at the start of a fit. ``checked``: strategy and precision, for messages. ``check``: returns the difference as text,
    empty if there is none. PrecisionContractError, if ``aligned``, else a warning: they differ.
    """
    newer = newer_than_tested()
    if not newer or checked in _passed:
        return
    found = " and ".join(f"{library} {version}" for library, version in newer.items())
    known = ", ".join(f"{library} {tested(library)}" for library in newer)
    newer_is = f"{found} is newer than the versions that lightning_shard was tested on ({known}). "
    if not (difference := check()):
        _passed.add(checked)
        rank_zero_info(f"{newer_is}The numbers of {checked} were checked against a plain loop, and are equal.")
        return
    problem = f"{newer_is}{checked} differs from a plain loop over the same data: {difference} of its largest element. "
    cure = f"Install {known}, or a newer lightning_shard."
    if aligned:
        raise PrecisionContractError(f"{problem}aligned: true holds equal numbers. {cure}")
    rank_zero_warn(problem + cure)


@contextmanager
def without_reduction(engine: Engine) -> Generator[None, None, None]:
    """Inside, backward passes end no accumulation."""
    engine.sync_gradients(False)
    try:
        yield
    finally:
        engine.sync_gradients(True)


def is_interrupted(trainer: Trainer | None, engine: Engine | None) -> bool:
    """Whether an error has ended the run. Then other ranks may be anywhere, and nothing may communicate."""
    if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
        return False
    return engine is None or trainer.world_size > 1


# Calls of Lightning that a run replaces


def replace_defaults(
    replacements: Replacements, trainer: Trainer, run: RunIdentity, checkpoints: Checkpoints, preemption: Preemption
) -> None:
    """Keep the loaders' order of data, choose the checkpoint to resume from, and handle signals."""
    loaders.keep_order(replacements, trainer)
    fitting = trainer.state.fn == TrainerFn.FITTING

    def choose(asked: Any) -> Any:
        chosen = run.choose_checkpoint(asked, fitting=fitting, folders=checkpoint_folders(trainer))
        checkpoints.opened = chosen if isinstance(chosen, OpenCheckpoint) else None
        return str(chosen.path) if isinstance(chosen, OpenCheckpoint) else chosen

    callbacks.choose_checkpoint(replacements, trainer, choose)
    if preemption.signals:
        loops.keep_out_signal_handlers(replacements, trainer)
        if fitting:
            preemption.take_over_signals()  # outside of fits signals end the process


def hook_batch_end(
    replacements: Replacements, trainer: Trainer, checkpoints: Checkpoints, saves: HeldSaves, preemption: Preemption
) -> None:
    """After each batch: save a held save, go back to a checkpoint, or save and stop."""
    go_back, stop = partial(roll_back_if_due, trainer, checkpoints), partial(preemption.stop_after_batch, trainer)
    # Before `Preemption.stop_after_batch`, which asks if a validation follows.
    clock = loops.validate_by_one_clock(trainer, trainer.strategy.broadcast)
    loops.after_each_batch(replacements, trainer, clock, saves.after_batch, go_back, stop)


def keep_batch(trainer: Trainer, identity: RunIdentity) -> None:
    """Keep the number of micro-batches per step of the newest checkpoint. All ranks call it."""
    if callbacks.callbacks_of(trainer, GradientAccumulationScheduler):
        return  # It sets the number.
    folders = checkpoint_folders(trainer)
    before = Ranks.of().first("reading the batches of a step", lambda: identity.micro_batches(folders))
    keeps, rest = divmod(before or 0, trainer.world_size)
    if keeps and not rest and keeps != trainer.accumulate_grad_batches:
        rank_zero_info(
            f"A step of run {identity.name} has {before} micro-batches, and so on {trainer.world_size} ranks "
            f"accumulate_grad_batches is {keeps}, and not {trainer.accumulate_grad_batches}."
        )
        trainer.accumulate_grad_batches = keeps


def hold_saves(
    replacements: Replacements,
    trainer: Trainer,
    engine: Engine,
    checkpoints: Checkpoints,
    saves: HeldSaves,
    async_save: bool | str,
) -> None:
    """Let Lightning's summary count sharded parameters, and hold saves until a step has ended."""
    if engine.gathers_in_forward and not engine.follows_freezing:
        callbacks.count_partitioned(replacements, trainer)
    saver = checkpoints.saver
    if async_save:
        callbacks.let_checkpoints_wait(replacements, trainer, is_writing=saver.is_writing, link=saver.link_checkpoint)
    saves.hold_saves(replacements, trainer, lambda: async_save == "continuous" and saver.is_busy)


def attach_averages(trainer: Trainer, engine: Engine, checkpoints: Checkpoints, memory: RunMemory | None) -> None:
    """Attach the average of an `EMACallback`, if any. ConfigurationError: the masters lie in files."""
    for callback in callbacks.callbacks_of(trainer, EMACallback):
        if any(held.kind == "masters" and held.memory == "nvme" for held in engine.memory_breakdown()):
            raise ConfigurationError(
                "EMACallback averages the masters in every step, but with the optimizer offloaded to NVMe they lie in "
                "files. Use offload_optimizer with device: cpu."
            )
        assert memory is not None, "it is made before the engine engages"
        averaging = Averaging(trainer.lightning_module, engine, callback, device=trainer.strategy.root_device)
        callback.use_average(averaging)
        checkpoints.averaging = memory.averaging = averaging


def keep_optimizers(engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Keep a fit's optimizers in an evaluation, for saves, if they step the module's parameters."""
    present = {id(parameter) for parameter in module.parameters()}
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if engine.steps_itself or not all(id(parameter) in present for parameter in stepped):
        return False
    engine.attach_optimizers(optimizers)
    return True
