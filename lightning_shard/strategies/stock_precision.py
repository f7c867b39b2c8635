"""Stock precision plugins, as Lightning makes them from the Trainer's flag."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from lightning_shard.errors import PrecisionError
from lightning_shard.precision.policy import ALL
from lightning_shard.strategies.precision import ShardPrecision


def translate(plugin: Precision | None) -> ShardPrecision | None:
    """The `ShardPrecision` that says the same as a stock plugin made by Lightning from the Trainer's flag.

    PrecisionError: the plugin carries more than the flag (a scaler, a quantiser, double precision), or a precision that
    these strategies do not run.
    """
    if plugin is None or isinstance(plugin, ShardPrecision):
        return plugin
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision):
        raise PrecisionError(
            f"precision is {str(plugin.precision)!r}, by the plugin {type(plugin).__name__}, but the strategies of "
            f"lightning_shard cast on their own and take no plugin that does. They run {ALL}."
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not _is_default(scaler):
        raise PrecisionError(
            f"precision is {str(plugin.precision)!r}, by the plugin {type(plugin).__name__} with a "
            f"{type(scaler).__name__} of its own, but the strategies of lightning_shard scale the loss themselves, the "
            "same on every engine. Give its settings to ShardPrecision('16-mixed', loss_scale=LossScaling(...)) in "
            "plugins instead."
        )
    return ShardPrecision(plugin.precision)  # type: ignore[arg-type]


def _is_default(scaler: Any) -> bool:
    """Whether Lightning made ``scaler`` from the flag: torch's own class with its default settings, not yet used."""
    if type(scaler) is not torch.amp.GradScaler:
        return False
    # torch switches one for CUDA off on a machine without it.
    default = torch.amp.GradScaler("cpu", enabled=scaler.is_enabled() or torch.cuda.is_available())
    return scaler.state_dict() == default.state_dict()
