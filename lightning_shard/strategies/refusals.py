"""What of a Trainer can't work here, refused with what to use in its place."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging

from lightning_shard import _lightning
from lightning_shard.errors import ConfigurationError


def refuse_callbacks(trainer: Trainer, *, full: bool, run: str) -> None:
    """Refuse the callbacks of a fit that would fail, or save something else than the user thinks.

    Args:
        trainer: whose callbacks.
        full: every rank has plain parameters; else they are sharded, or replicated as DTensors.
        run: what the message calls the run: strategy and precision.

    Raises:
        ConfigurationError: on every rank.
    """
    saving = bool(trainer.checkpoint_callbacks)
    for callback in _lightning.callbacks(trainer):
        name = type(callback).__name__
        # They mix DTensors with copies that were made before the module was sharded, or look for single elements.
        if not full and isinstance(callback, StochasticWeightAveraging | WeightAveraging | ModelPruning):
            raise ConfigurationError(
                f"{name} works on whole parameters, which {run} does not have. Use shard_ddp with precision "
                "'32-true'; or, to average weights, keep clones of self.parameters() in your module and update them in "
                "on_train_batch_end, since clones are cut as the parameters are."
            )
        if saving and isinstance(callback, WeightAveraging | ModelPruning):
            raise ConfigurationError(
                f"{name} writes other tensors than the module's own into the checkpoint, which the portable checkpoint "
                "has no place for. Set enable_checkpointing: false and save the result after the fit, or remove the "
                "callback."
            )


def refuse_sync_batchnorm(device: torch.device) -> None:
    """Refuse ``Trainer(sync_batchnorm=True)`` on a CPU.

    Raises:
        ConfigurationError: on every rank.
    """
    if device.type == "cpu":
        raise ConfigurationError(
            "sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs alone. Set sync_batchnorm: false for "
            "accelerator: cpu."
        )
