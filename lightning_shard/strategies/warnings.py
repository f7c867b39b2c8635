"""What a fit is told at its start about the dtypes of its parameters."""

from collections.abc import Iterable, Mapping

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shard.precision.policy import PrecisionPolicy, short


def warn_of_precision(
    precision: str, policy: PrecisionPolicy, upcast: Mapping[str, torch.dtype], optimizers: Iterable[Optimizer]
) -> None:
    """Say which parameters are stepped in another dtype than they were loaded in, and what 16-bit steps lose."""
    if upcast:
        names = list(upcast)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        dtypes = ", ".join(sorted({str(d).removeprefix("torch.") for d in upcast.values()}))
        master = str(policy.master).removeprefix("torch.")
        rank_zero_warn(
            f"{len(names)} trainable parameters were loaded in {dtypes} and are stepped as {master} masters: {shown}."
        )
    if not policy.is_low_memory:
        return
    name, spacing = short(policy.master), torch.finfo(policy.master).eps
    text = (
        f"precision {precision!r} steps parameters in {name}: an update smaller than about {spacing / 2:.1g} of its "
        f"parameter is lost. For fp32 masters use precision {precision.removesuffix('true')}mixed, or the strategy's "
        "_aligned name."
    )
    if policy.master == torch.float16:
        text += " Gradients below 6e-8 are zero, because fp16 gradients can't be scaled."
        for optimizer in optimizers:
            eps = optimizer.defaults.get("eps")
            if isinstance(eps, float) and eps > 0 and torch.tensor(eps, dtype=torch.float16) == 0:
                text += f" {type(optimizer).__name__}'s eps {eps:g} is zero in fp16, so that it may divide by zero."
    rank_zero_warn(text)
