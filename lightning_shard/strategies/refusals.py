"""Refusals of Trainer settings, callbacks and losses that can't work here, and explanations of torch's errors."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_shard._lightning import callbacks
from lightning_shard.checkpoint.files.location import location
from lightning_shard.cluster.traces import keep_user_frames
from lightning_shard.engines.dtensor_refusals import BETWEEN_STEPS
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.module_checks import MIXED, RELEASED, DifferentUse
from lightning_shard.errors import ConfigurationError, PrecisionError, ShardError
from lightning_shard.meters.memory_account import append_to_message
from lightning_shard.precision.policy import ALL, PrecisionPolicy, short
from lightning_shard.ranks import Ranks
from lightning_shard.run.run_memory import RunMemory, explain_out_of_memory
from lightning_shard.strategies.settings import CommonSettings
from lightning_shard.text import listed


def refuse_loss(output: Any, module: LightningModule) -> None:
    """Refuse the output of a training step if backward can't start from it (ConfigurationError)."""
    if is_overridden("backward", module):
        return
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return
        gradient = "with a gradient" if loss.requires_grad else "without a gradient"
        found = f"a {loss.dtype} tensor of shape {tuple(loss.shape)} {gradient}"
    elif loss is None and module.trainer.world_size == 1 and (output is None or "loss" in output):
        return  # Lightning skips the batch.
    else:
        found = f"{str(output)[:100]}, a {type(output).__name__}"
    code = inspect.unwrap(type(module).training_step).__code__
    raise ConfigurationError(
        f"training_step returned {found}, but backward needs one number that depends on trainable parameters. Return "
        'the loss tensor itself, its .mean() or .sum(), alone or as the entry "loss" of a mapping, with a weight of 0 '
        f"if the batch is not to count ({code.co_filename}:{code.co_firstlineno})."
    )


def refuse_plugin(plugin: Precision) -> None:
    """Refuse a stock plugin with more than the Trainer's flag: a scaler, a quantiser, double (PrecisionError)."""
    scaler = getattr(plugin, "scaler", None)
    own = f" with a {type(scaler).__name__} of its own" if scaler is not None and not _is_default(scaler) else ""
    if own or type(plugin) not in (Precision, HalfPrecision, MixedPrecision):
        raise PrecisionError(
            f"precision is {str(plugin.precision)!r}, by the plugin {type(plugin).__name__}{own}, but the strategies "
            f"of lightning_shard cast and scale on their own. They run {ALL}. Give settings of a scaler to "
            "ShardPrecision('16-mixed', loss_scale=LossScaling(...))."
        )


def _is_default(scaler: Any) -> bool:
    """Whether Lightning made ``scaler`` from the flag: torch's own class, default settings, not yet used."""
    # torch disables a CUDA scaler on a machine without CUDA.
    default = torch.amp.GradScaler("cpu", enabled=scaler.is_enabled() or torch.cuda.is_available())
    return type(scaler) is torch.amp.GradScaler and scaler.state_dict() == default.state_dict()


def refuse_engine_before_run(strategy: str) -> NoReturn:
    """Refuse to give an engine before a run (ConfigurationError)."""
    raise ConfigurationError(
        f"{strategy} has no engine yet: the Trainer makes it in fit, validate, test or predict. Ask for tensors, "
        "gradients and the engine in a hook of these, or after them."
    )


_AVERAGES = (
    "copies the whole module, while weights lie in shards here: use lightning_shard.EMACallback, whose average lies in "
    "shards too (decay: equal takes the mean)."
)
_REFUSED: dict[type[Callback], str] = {
    BatchSizeFinder: "doubles the batch until memory runs out, but if one rank's does, the others wait in a "
    "collective. Use lightning_shard.callbacks.BatchSizeCallback, which measures small batches.",
    WeightAveraging: _AVERAGES,
    StochasticWeightAveraging: _AVERAGES,
}


def refuse_trainer(trainer: Trainer) -> None:
    """Refuse callbacks that can't work, and checkpoint folders that can't be written (ConfigurationError)."""
    for callback in callbacks.callbacks_of(trainer):
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"{type(callback).__name__} {why}")
    for folder, name in _folders(trainer).items():
        path = Path(folder).absolute()
        there = next(above for above in (path, *path.parents) if os.path.exists(above))
        if "://" not in folder and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise ConfigurationError(
                f"{name} saves into {folder}, but {there} is no folder that can be written. Set "
                "dirpath of the callback or default_root_dir of the Trainer to one."
            )


def refuse_stores(trainer: Trainer) -> None:
    """Refuse stores of a fit's checkpoints that rank 0 can't reach (CheckpointError). All ranks call it, before
    callbacks end in raw errors there.
    """
    stores = [folder for folder in _folders(trainer) if "://" in folder]
    if stores:
        Ranks.of().first(
            "looking into the stores of checkpoints", lambda: [location(store).exists() for store in stores]
        )


def _folders(trainer: Trainer) -> dict[str, str]:
    """Folder to class name, of the callbacks that save a fit's checkpoints."""
    usual = [logger.save_dir for logger in trainer.loggers[:1] if logger.save_dir] or [trainer.default_root_dir]
    callbacks = trainer.checkpoint_callbacks if trainer.state.fn == TrainerFn.FITTING else []
    return {str(getattr(each, "dirpath", None) or usual[0]): type(each).__name__ for each in callbacks}


def refuse_callbacks(trainer: Trainer, engine: Engine, run: str) -> None:
    """Refuse a fit's callbacks that would fail or save other tensors (ConfigurationError). ``run``: its name."""
    for callback in callbacks.callbacks_of(trainer, (BaseFinetuning, ModelPruning)):
        why = ""
        if isinstance(callback, BaseFinetuning) and not engine.follows_freezing:
            why = (
                f"freezes and thaws parameters, but {run} steps those that are trainable when the fit begins. Use "
                "shard_fsdp or shard_ddp, or freeze in configure_model"
            )
        elif isinstance(callback, ModelPruning) and not engine.replicates:
            # It selects single elements of plain parameters.
            why = f"works on full parameters, which {run} does not have. Use shard_ddp with precision '32-true'"
        elif isinstance(callback, ModelPruning) and trainer.checkpoint_callbacks:
            why = (
                "saves other tensors than the module's own, but a portable checkpoint has no place for them. Set "
                "enable_checkpointing: false and save the result after the fit"
            )
        if why:
            raise ConfigurationError(f"{type(callback).__name__} {why}, or remove the callback.")


_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls between backward and the step (`Precision.post_backward` and ``_after_closure``). Of the
module also ``configure_gradient_clipping``. Gradients are dropped before backward (``on_before_zero_grad``), and the
pass runs inside of ``optimizer_step`` and ``backward``.
"""


def refuse_gradient_hooks(trainer: Trainer, engine: Engine, settings: CommonSettings) -> None:
    """Refuse the user's hooks between backward and the step if parameters do not have their gradients then. It is a
    ConfigurationError on every rank under ``aligned``, else a warning, as for a step by hand.
    """
    if engine.shows_gradients or settings.hooks_use_accessor:
        return
    module, strategy = trainer.lightning_module, type(trainer.strategy).__name__
    found = [(module, hook) for hook in (*_GRADIENT_HOOKS, "configure_gradient_clipping")]
    found += [(callback, hook) for callback in callbacks.callbacks_of(trainer) for hook in _GRADIENT_HOOKS]
    names = [f"{type(owner).__name__}.{hook}" for owner, hook in found if _is_users(hook, owner)]
    refused = settings.aligned and bool(names)
    if not module.automatic_optimization:
        names.append(f"{type(module).__name__}.training_step, which steps by hand")
    if not names:
        return
    text = (
        f"Between backward and the optimizer's step runs {listed(names)}, but under {strategy} .grad of a "
        "parameter is not its reduced gradient there. Read and write that with "
        'lightning_shard.full_parameters(trainer, kind="gradient") or full_tensor, clip with self.clip_gradients, zero '
        "gradients (cancel_gradients) in place of .grad = None, and set hooks_use_accessor: true "
        "(examples/guides/contract.md)"
    )
    if refused:
        raise ConfigurationError(f"{text}, or use shard_ddp_aligned or shard_fsdp_aligned.")
    rank_zero_warn(f"{text}.")


def _is_users(hook: str, owner: Any) -> bool:
    """Whether ``owner``, a module or a callback, overrides ``hook`` outside of Lightning and this package."""
    parent = LightningModule if isinstance(owner, LightningModule) else Callback
    where = str(getattr(getattr(owner, hook), "__module__", "")).partition(".")[0]
    return is_overridden(hook, owner, parent=parent) and where not in ("lightning", "lightning_shard")


def refuse_sync_batchnorm(layer_sync: object | None, device: torch.device) -> None:
    """Refuse ``Trainer(sync_batchnorm=True)``, which sets ``layer_sync``, on a CPU (ConfigurationError)."""
    if layer_sync is not None and device.type == "cpu":
        raise ConfigurationError(
            "sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs alone. Set sync_batchnorm: false for "
            "accelerator: cpu."
        )


def warn_of_precision(precision: str, policy: PrecisionPolicy, upcast: Mapping[str, torch.dtype]) -> None:
    """Warn of parameters that are stepped in another dtype than the loaded one, and of updates that 16 bits lose."""
    name = short(policy.master)
    if upcast:
        rank_zero_warn(
            f"{len(upcast)} trainable parameters were loaded in {', '.join(sorted(map(short, set(upcast.values()))))} "
            f"and are stepped as {name} masters: {listed(upcast, most=3)}."
        )
    if policy.is_low_memory:
        lost = torch.finfo(policy.master).eps / 2
        fp16 = " fp16 gradients can't be scaled: those below 6e-8 are zero. So is an optimizer's eps of 1e-8."
        rank_zero_warn(
            f"precision {precision!r} steps parameters in {name}: an update smaller than about {lost:.1g} of its "
            f"parameter is lost. For fp32 masters use precision {precision.removesuffix('true')}mixed, or the "
            f"strategy's _aligned name.{fp16 if policy.master == torch.float16 else ''}"
        )


_EXPLANATIONS = {
    **dict.fromkeys(
        (
            MIXED,
            "is not supported for tensor subclasses",
            "sharding strategy registered",
            "Sharding propagation failed",
            "that require placement changes are not supported",
        ),
        "Under FSDP parameters and their gradients are DTensors outside of the step: shards, not to be computed with "
        'plain tensors. Use lightning_shard.full_parameters(trainer, ...), with the kind "gradient" for gradients '
        "(examples/guides/contract.md, in which average_teacher is the momentum update of a teacher), or use shard_ddp "
        "in '32-true'.",
    ),
    **dict.fromkeys(RELEASED, f"Stage 3 keeps parameters empty but while their modules run: {BETWEEN_STEPS}."),
    "Inference tensor": "If a hook of validate, test or predict has run a forward pass of this module, it did so in "
    "inference mode, and engines can't train on parameters that were gathered for it: set inference_mode: false of "
    "that Trainer.",
}
"""Part of torch's message to its explanation."""

_SIXTEEN_BITS = re.compile(
    r"type.*(BFloat16|bfloat16|Half|\bfloat16)|(BFloat16|bfloat16|Half|\bfloat16).*type|'(BFloat16|Half)'"
)
"""torch's messages on 16-bit tensors that meet others, and on operators without 16 bits."""

_CAST = (
    "Parameters and floating inputs of modules are cast to the precision's compute dtype, buffers and tensors that "
    "forward makes are not, and some operators take no 16 bits. Cast buffers in forward to the dtype of the input "
    "(self.buffer.to(x.dtype)), compute in .float(), set autocast: true, or use precision '32-true'."
)


def warn_of_unsaved(trainer: Trainer, path: Any) -> None:
    """Warn that no checkpoint is saved at ``path`` after an error, because all ranks save together."""
    if trainer.global_step:
        rank_zero_warn(
            f"{path} is not saved after the error: rank {trainer.global_rank} can't know how far the others are. "
            "Resume from the last checkpoint of a ModelCheckpoint with every_n_train_steps, or by ckpt_path: auto."
        )


def explain_error(
    error: BaseException, memory: RunMemory | None, saved: Sequence[str] = (), *, all_frames: bool
) -> None:
    """Add an explanation to out-of-memory errors, and to torch's errors in users' hooks.

    If ranks use different parameters, name the newest of the checkpoints ``saved`` by this fit. Cut the traceback of
    this package's errors to the user's frames, unless ``all_frames``.
    """
    if isinstance(error, DifferentUse) and saved:
        append_to_message(error, f"The newest checkpoint of this fit is {saved[0]}.")
    explain_out_of_memory(error, memory)
    told = [more for said, more in _EXPLANATIONS.items() if said in str(error)]
    if told and isinstance(error, RuntimeError | AssertionError):
        append_to_message(error, told[0])
    if isinstance(error, RuntimeError | ValueError) and _SIXTEEN_BITS.search(str(error)):
        append_to_message(error, _CAST)
    if isinstance(error, ShardError) and not all_frames:
        keep_user_frames(error)
