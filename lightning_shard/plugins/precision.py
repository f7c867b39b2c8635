"""The Lightning side of the precision policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch.plugins.precision import (
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch.optim import Optimizer

from lightning_shard.errors import PrecisionError
from lightning_shard.precision.policy import PRECISIONS, PrecisionPolicy, policy_from

ClipFunction = Callable[[Optimizer, float, str], None]


class ShardPrecision(Precision):
    """Says which precision a strategy of this package runs in; the engines do the casting.

    No autocast is involved: parameters and floating module inputs are cast as a whole, the same on every engine.
    It is built from ``Trainer(precision=...)`` when none is given.
    """

    def __init__(self, precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true") -> None:
        """Store the precision.

        Args:
            precision: as in ``Trainer(precision=...)``; what it means for each dtype is in `policy_from`.

        Raises:
            PrecisionError: a precision that these strategies do not run.
        """
        super().__init__()
        policy_from(precision, aligned=False)
        self.precision = precision
        self._clip: ClipFunction | None = None

    def policy(self, *, aligned: bool) -> PrecisionPolicy:
        """The dtypes that this precision stands for."""
        return policy_from(self.precision, aligned=aligned)

    def clip_with(self, clip: ClipFunction) -> None:
        """Let the strategy clip: it knows how the gradients are cut."""
        self._clip = clip

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Clip the gradients of ``optimizer`` by the strategy's one formula. All ranks call it."""
        assert self._clip is not None, "the precision plugin was not connected to a strategy of this package"
        self._clip(
            optimizer,
            float(clip_val),
            str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)),
        )


def translate(plugin: Precision | None) -> ShardPrecision | None:
    """The `ShardPrecision` that says the same as a stock plugin made by Lightning from the Trainer's flag.

    Raises:
        PrecisionError: the plugin carries more than the flag (a scaler, a quantiser, double precision), or a
            precision that these strategies do not run.
    """
    if plugin is None or isinstance(plugin, ShardPrecision):
        return plugin
    if type(plugin) in (Precision, HalfPrecision, MixedPrecision):
        return ShardPrecision(plugin.precision)  # type: ignore[arg-type]
    raise PrecisionError(
        f"precision is {str(plugin.precision)!r}, by the plugin {type(plugin).__name__}, but the strategies of "
        f"lightning_shard cast on their own and take no plugin that does. Use precision: one of "
        f"{', '.join(repr(p) for p in PRECISIONS)}, or ShardPrecision in plugins."
    )
