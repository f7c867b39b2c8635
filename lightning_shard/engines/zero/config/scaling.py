"""The loss scale of a DeepSpeed ``fp16`` section, as the one that every engine here has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.reading import AUTO
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.precision.loss_scale import LossScaling

SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def loss_scaling_of(fp16: Mapping[str, Any]) -> LossScaling | None:
    """The loss scale that an ``fp16`` section in canonical form asks for; None: it says nothing about it.

    DeepSpeed's own defaults hold for what a section that says something leaves out (``DeepSpeedFP16Config``).

    Raises:
        ConfigurationError: what this package's loss scale can't do: a static scale, a hysteresis that is refilled by
            each good step, a minimum that is no power of two.
    """
    given = {key: value for key, value in fp16.items() if value != AUTO}
    if given.get("enabled") is False:
        return None
    if given.get("consecutive_hysteresis"):
        raise ConfigurationError(
            "fp16.consecutive_hysteresis is true, but the loss scale's hysteresis is refilled only when the scale "
            "grows. Remove it."
        )
    static = given.get("loss_scale", 0)
    if static != 0:
        power = max(0, round(math.log2(static))) if static > 0 else 16
        raise ConfigurationError(
            f"fp16.loss_scale is {static:g}, a static scale, but the scale is dynamic on every engine here. Set "
            f"fp16.loss_scale to 0 and fp16.initial_scale_power to {power}, to begin at {2.0**power:g}."
        )
    if not any(key in given for key in SCALE_KEYS):
        return None
    try:
        return LossScaling(
            initial=math.ldexp(1.0, given.get("initial_scale_power", 16)),
            growth_interval=given.get("loss_scale_window", 1000),
            hysteresis=given.get("hysteresis", 2),
            minimum=float(given.get("min_loss_scale", 1)),
        )
    except (PrecisionError, OverflowError) as error:
        shown = ", ".join(f"{key} {given[key]!r}" for key in SCALE_KEYS if key in given)
        raise ConfigurationError(f"The fp16 section ({shown}) can't be used: {error}") from error
