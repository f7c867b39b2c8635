"""A Trainer's callbacks: which there are, which watch gradients being dropped, and what a summary counts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, ModelSummary
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary, summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning.replaced import Replacements


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks, an attribute that its class does not declare."""
    return list(vars(trainer)["callbacks"])


def watches_zero_grad(trainer: Trainer) -> bool:
    """Whether the module or a callback has a hook that Lightning calls where it drops gradients, or does so itself."""
    module = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks(trainer)
    )


def count_sharded_parameters(replacements: Replacements, trainer: Trainer) -> None:
    """Let ``ModelSummary`` callbacks count parameters that ZeRO-3 has sharded in full, and show each rank's shard.

    Lightning does so for its own DeepSpeed strategy alone.
    """

    def summary(depth: int, trainer: Trainer, module: LightningModule) -> Any:
        sharded = any(hasattr(p, "ds_numel") for p in module.parameters())
        return (DeepSpeedSummary if sharded else summarize)(module, max_depth=depth)

    for callback in callbacks(trainer):
        if isinstance(callback, ModelSummary):
            replacements.replace(callback, "_summary", partial(summary, callback._max_depth))


def leave_flat_groups_unnamed(replacements: Replacements, trainer: Trainer) -> None:
    """Let callbacks that freeze before the fit not look for the names of what is in an optimizer's groups."""
    for callback in callbacks(trainer):
        if isinstance(callback, BaseFinetuning):
            replacements.replace(callback, "_store", lambda *_: None)


_TRAINABLE = "trainable_parameters"


def thawed(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of which parameters are trainable, where callbacks freeze and thaw."""
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks(trainer)):
        return {}
    named = trainer.lightning_module.named_parameters()
    return {_TRAINABLE: [name for name, parameter in named if parameter.requires_grad]}


def thaw_again(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give a resumed fit the trainable parameters and the optimizers' groups that the checkpoint's had.

    Lightning makes the groups when a fit starts, from state that it restores later under engines, and thaws nothing.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks(trainer):
        if isinstance(callback, BaseFinetuning) and callback.state_key in states and _TRAINABLE in checkpoint:
            callback.load_state_dict(states[callback.state_key])
            callback.on_fit_start(trainer, trainer.lightning_module)
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name in checkpoint[_TRAINABLE])


def let_errors_through(replacements: Replacements, trainer: Trainer) -> None:
    """Keep callbacks that save when a run fails from waiting for other ranks, and from hiding the run's error.

    A save is made by all ranks together. After an error the others may be anywhere, and so may the parameters of a
    unit whose forward was interrupted: several ranks save nothing, and one says why if it can't.
    """

    def on_exception(save: Any, name: str, trainer: Trainer, module: LightningModule, error: BaseException) -> None:
        reason = f"rank {trainer.global_rank} can't know where the others are" if trainer.world_size > 1 else ""
        try:
            if not reason:
                save(trainer, module, error)
        except Exception as failed:
            reason = str(failed)
        if reason:
            rank_zero_warn(
                f"{name} saved nothing after {type(error).__name__}: {reason}. Resume from the last checkpoint of a "
                "ModelCheckpoint with every_n_train_steps, or by ckpt_path: auto."
            )

    for callback in callbacks(trainer):
        if isinstance(callback, Checkpoint):
            save, name = callback.on_exception, type(callback).__name__
            replacements.replace(callback, "on_exception", partial(on_exception, save, name))
