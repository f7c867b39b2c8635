"""What the parts of a run are told of a Trainer, and what all ranks must have the same before they begin."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard._lightning import callbacks, loaders
from lightning_shard.checkpoint.files.place import Place, place
from lightning_shard.engines.engine import Engine, PlannedRun, Run, TrainerFacts
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks


def run_of(
    trainer: Trainer,
    planned: PlannedRun,
    *,
    device: torch.device,
    mesh: DeviceMesh,
    watch: Callable[[], AbstractContextManager[None]],
) -> Run:
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
        watch=watch,
    )


def _set_up(trainer: Trainer, planned: PlannedRun, mesh: DeviceMesh) -> str:
    parameters = [p for p in trainer.lightning_module.parameters() if not is_lazy(p)]  # which engines refuse
    # What ZeRO-3 has sharded is empty; DTensors have their full size.
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if not p.requires_grad)
    replicate, shard = mesh.shape
    precision = planned.precision + " aligned" * planned.aligned
    text = f"{type(trainer.strategy).__name__}: {replicate} x {shard} ranks (replicate x shard), {precision}"
    return f"{text}, {numel:,} parameters" + f", {frozen:,} of them frozen" * bool(frozen)


def checkpoint_folders(trainer: Trainer) -> list[Place]:
    """Where the Trainer's ``ModelCheckpoint``s save, in every version of the logger's folder."""
    folders: list[Place] = []
    for callback in trainer.checkpoint_callbacks:
        directory = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
        if not directory:
            continue
        folder = place(directory)
        folders.append(folder)
        if trainer.loggers and folder.name == "checkpoints":
            # Without a fixed version a logger makes a new one each time that the run is started.
            folders += sorted(folder.parent.parent.glob("*/checkpoints"), key=str)
    return folders


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
    for callback in callbacks.callbacks(trainer):
        if (hook := getattr(callback, "before_sharding", None)) is not None:
            hook(trainer, module)


def lay_out_parameters(module: LightningModule) -> None:
    """Lay out every parameter row by row: kernels round by the layout of their operands, and shards have no other."""
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
    """``optimizers``, whose classes, groups and hyperparameters must be the same on all ranks, or a ConfigurationError
    on each names what differs. All ranks call it.
    """
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
