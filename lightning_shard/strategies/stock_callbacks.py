"""Lightning's callbacks that can't work here, refused with what to use in their place."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging

from lightning_shard.errors import ConfigurationError


def refuse_callbacks(callbacks: Iterable[Callback], *, whole: bool, saving: bool, run: str) -> None:
    """Refuse the callbacks among ``callbacks`` that would fail, or save something else than the user thinks.

    Args:
        callbacks: the Trainer's, in a fit.
        whole: every rank has plain parameters; else they are cut, or replicated as DTensors.
        saving: the Trainer has a ``ModelCheckpoint``.
        run: what the message calls the run: strategy and precision.

    Raises:
        ConfigurationError: on every rank alike.
    """
    for callback in callbacks:
        name = type(callback).__name__
        # They mix DTensors with copies that were made before the module was sharded, or look for single elements.
        if not whole and isinstance(callback, StochasticWeightAveraging | WeightAveraging | ModelPruning):
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
