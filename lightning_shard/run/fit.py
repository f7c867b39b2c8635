"""What the parts of a run are told of a Trainer, what all ranks must have the same before they begin, and what is done
in place of Lightning: choose what it resumes from, take signals.
"""

import hashlib
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
from lightning.pytorch.utilities.rank_zero import rank_zero_info
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
from lightning_shard.errors import ConfigurationError
from lightning_shard.precision.casting import widen_statistics
from lightning_shard.ranks import Ranks
from lightning_shard.run.averaging import Averaging
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.memory import Memory
from lightning_shard.run.nonfinite import roll_back
from lightning_shard.run.preemption import Preemption, RunIdentity, checkpoint_folders


def run_of(trainer: Trainer, planned: PlannedRun, device: torch.device, mesh: DeviceMesh) -> Run:
    """What an engine is told of a Trainer's run. All ranks call it; the other arguments are `Run`'s."""

    def total_steps() -> int | None:
        steps = trainer.estimated_stepping_batches
        return int(steps) if math.isfinite(steps) and steps > 0 else None

    module = trainer.lightning_module
    if trainer.state.fn == TrainerFn.FITTING:
        rank_zero_info(_set_up(trainer, planned, mesh))
    return Run(
        planned=planned,
        device=device,
        mesh=mesh,
        seed=int(Ranks.of().broadcast(torch.initial_seed())),
        fitting=trainer.state.fn == TrainerFn.FITTING,
        automatic=module.automatic_optimization,
        # One that steps by itself may let batches pass without a step.
        foresees_steps=module.automatic_optimization and not is_overridden("optimizer_step", module),
        trainer=TrainerFacts(
            micro_batch_size=loaders.train_batch_size(trainer),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm"),
            total_steps=total_steps,
        ),
    )


def _set_up(trainer: Trainer, planned: PlannedRun, mesh: DeviceMesh) -> str:
    parameters = [p for p in trainer.lightning_module.parameters() if not is_lazy(p)]  # which engines refuse
    # What ZeRO-3 has sharded is empty; DTensors have their full size.
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if not p.requires_grad)
    axes = dict(zip(mesh.mesh_dim_names or (), map(str, mesh.shape), strict=True))
    precision = planned.precision + " aligned" * planned.aligned
    text = f"{type(trainer.strategy).__name__}: {' x '.join(axes.values())} ranks ({' x '.join(axes)}), {precision}"
    return f"{text}, {numel:,} parameters" + f", {frozen:,} of them frozen" * bool(frozen)


_COMPARED = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "val_check_interval")
_PLAIN = (str, int, float, bool, type(None), tuple)


def compared_settings(strategy: object, settings: Mapping[str, Any], trainer: Trainer) -> dict[str, str]:
    """Names and values of what must not differ between ranks: the ``strategy``'s ``settings`` and hyperparameters."""
    found = {"strategy": type(strategy).__name__, "precision": str(trainer.precision)}
    found |= {f"strategy.{name}": repr(value) for name, value in settings.items()}
    found |= {f"trainer.{name}": repr(getattr(trainer, name, None)) for name in _COMPARED}
    found["trainer.default_root_dir"] = os.path.abspath(str(trainer.default_root_dir))
    module = trainer.lightning_module
    found["model"] = type(module).__qualname__
    hparams = dict(getattr(module, "hparams", {}))
    return found | {f"model.{name}": repr(value) for name, value in hparams.items() if isinstance(value, _PLAIN)}


def before_sharding(trainer: Trainer, module: LightningModule, layer_sync: Any) -> None:
    """Let callbacks with a hook ``before_sharding(trainer, module)``, and ``layer_sync``, which puts synchronised batch
    norms in, see the module while its parameters are full, or on the meta device.
    """
    if layer_sync is not None:
        layer_sync.apply(module)
    for callback in callbacks.callbacks_of(trainer):
        if (hook := getattr(callback, "before_sharding", None)) is not None:
            hook(trainer, module)


def lay_out_tensors(module: LightningModule) -> None:
    """Lay out every parameter row by row, as in shards: kernels round by it. Statistics in 16 bits become fp32."""
    widen_statistics(module)
    for parameter in (p for p in module.parameters() if p.layout == torch.strided and not is_lazy(p)):
        # `is_contiguous` looks at no dim of size 1, and kernels do.
        if parameter.stride() != torch.empty(parameter.shape, device="meta").stride():
            parameter.data = parameter.data.contiguous().flatten().view(parameter.shape)


def begin_batch(trainer: Trainer, engine: Engine, buffers: SharedBuffers) -> None:
    """Ahead of a training batch that begins a step, give all ranks, which call it, rank 0's buffers, as under DDP, and
    drop the last step's gradients, which Lightning would keep beside forward's activations.
    """
    automatic = trainer.lightning_module.automatic_optimization
    if automatic and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return  # Lightning drops no gradients in this batch.
    if engine.shares_buffers:
        buffers.share()
    if automatic and not callbacks.watches_zero_grad(trainer):
        engine.free_gradients()


def same_on_all_ranks(optimizers: list[Optimizer]) -> list[Optimizer]:
    """``optimizers``, all ranks call it; a ConfigurationError on each names settings that differ between ranks."""
    own = _hyperparameters(optimizers)
    ranks = Ranks.of()
    digests = ranks.gather(hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:16])
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return optimizers
    first, differing = ranks.broadcast(own), ranks.broadcast(own, other)
    names = [name for name in {**first, **differing} if first.get(name) != differing.get(name)]
    found = "; ".join(f"{n} is {first.get(n, 'not there')} and {differing.get(n, 'not there')}" for n in names[:4])
    raise ConfigurationError(
        f"configure_optimizers makes other optimizers on rank {other} than on rank 0: {found}. Ranks step shards of "
        "the same parameters: derive hyperparameters from what is the same on every rank."
    )


def _hyperparameters(optimizers: list[Optimizer]) -> dict[str, str]:
    found = {"the number of optimizers": str(len(optimizers))}
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer {index}"
        found[f"the class of {name}"] = type(optimizer).__qualname__
        for number, group in enumerate(optimizer.param_groups):
            own = f"of group {number} of {name}"
            found[f"the number of parameters {own}"] = str(len(group["params"]))
            found |= {f"{key} {own}": _text(value) for key, value in group.items() if key != "params"}
    return found


def _text(value: Any) -> str:
    # What prints an address differs on every rank.
    plain = isinstance(value, int | float | str | bool | tuple | list | type(None))
    return repr(value) if plain else type(value).__qualname__


@contextmanager
def without_reduction(engine: Engine) -> Generator[None, None, None]:
    """Inside, backward passes end no accumulation."""
    engine.sync_gradients(False)
    try:
        yield
    finally:
        engine.sync_gradients(True)


def is_interrupted(trainer: Trainer | None, engine: Engine | None) -> bool:
    """Whether an error has ended a run in which all ranks save together, and of which others may be anywhere."""
    if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
        return False
    return engine is None or trainer.world_size > 1


# What a run does in place of Lightning


def take_over(
    replacements: Replacements, trainer: Trainer, run: RunIdentity, checkpoints: Checkpoints, preemption: Preemption
) -> None:
    """Keep the order of data that the loaders say, and choose checkpoints and take signals in Lightning's place."""
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
            preemption.take_over_signals()  # which end the process elsewhere


GoBack = Callable[[Callable[[str], None]], None]


def after_batches(
    replacements: Replacements,
    trainer: Trainer,
    checkpoints: Checkpoints,
    saves: HeldSaves,
    preemption: Preemption,
    go_back: GoBack,
) -> None:
    """After each batch save what is due, then ``go_back`` to a checkpoint or stop, which saves, where that is due."""
    restore, stop = partial(roll_back, trainer, checkpoints), partial(preemption.after_batch, trainer)
    clock = loops.validate_by_one_clock(
        trainer, trainer.strategy.broadcast
    )  # ahead of what asks if a validation follows
    loops.after_each_batch(replacements, trainer, clock, saves.after_batch, partial(go_back, restore), stop)


def keep_batch(trainer: Trainer, identity: RunIdentity) -> None:
    """Change ``accumulate_grad_batches`` to keep the newest checkpoint's micro-batches in a step. All ranks call it."""
    if callbacks.callbacks_of(trainer, GradientAccumulationScheduler):
        return  # It alone says how many.
    folders = checkpoint_folders(trainer)
    before = Ranks.of().first("reading the batches of a step", lambda: identity.micro_batches(folders))
    keeps, rest = divmod(before or 0, trainer.world_size)
    if keeps and not rest and keeps != trainer.accumulate_grad_batches:
        rank_zero_info(
            f"A step of run {identity.name} has {before} micro-batches, and so on {trainer.world_size} ranks "
            f"accumulate_grad_batches is {keeps}, and not {trainer.accumulate_grad_batches}."
        )
        trainer.accumulate_grad_batches = keeps


def settle_fit(
    replacements: Replacements,
    trainer: Trainer,
    engine: Engine,
    checkpoints: Checkpoints,
    saves: HeldSaves,
    async_save: bool | str,
) -> None:
    """Count sharded parameters, and hold saves until a step has ended."""
    if engine.gathers_in_forward and not engine.follows_freezing:
        callbacks.count_partitioned(replacements, trainer)
    saver = checkpoints.saver
    if async_save:
        callbacks.let_checkpoints_wait(replacements, trainer, is_writing=saver.is_writing, link=saver.link_checkpoint)
    saves.begin(replacements, trainer, lambda: async_save == "continuous" and saver.is_busy)


def begin_averaging(trainer: Trainer, engine: Engine, checkpoints: Checkpoints, memory: Memory | None) -> None:
    """Let an `EMACallback`, if any, average what is engaged; ConfigurationError: that lies in files."""
    for callback in callbacks.callbacks_of(trainer, EMACallback):
        if any(held.kind == "masters" and held.memory == "nvme" for held in engine.tensors.memory_breakdown()):
            raise ConfigurationError(
                "EMACallback averages the masters in every step, but with the optimizer offloaded to NVMe they lie in "
                "files. Use offload_optimizer with device: cpu."
            )
        assert memory is not None, "it is made before the engine engages"
        averaging = Averaging(trainer.lightning_module, engine, callback, device=trainer.strategy.root_device)
        callback.begin(averaging)
        checkpoints.averaging = memory.averaging = averaging


def keeps_optimizers(engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a run that is no fit leaves a fit's optimizers, for saves: they step the module's parameters."""
    present = {id(parameter) for parameter in module.parameters()}
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if engine.steps_itself or not all(id(parameter) in present for parameter in stepped):
        return False
    engine.attach_optimizers(optimizers)
    return True
