"""The precision policy: which dtype is used where. Plain data, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_shard.errors import PrecisionError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""The precision strings that run. The fp16 rows (``16-mixed``, ``16-true``) are refused: see `policy_from`."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes of one run.

    Buffers and torchmetrics states always keep the dtype that the model gave them, as do frozen parameters; inside
    a forward the parameters, trainable or frozen, are seen in ``compute``.
    """

    compute: torch.dtype
    """Dtype of parameters, floating inputs and gradients inside forward and backward."""

    master: torch.dtype
    """Dtype of the trainable parameters that the optimizer steps, and so of its state."""

    reduce: torch.dtype
    """Dtype in which gradients cross the network."""

    accumulate: torch.dtype
    """Dtype in which gradients of several micro-batches are summed."""

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are cast from the master to another dtype for compute."""
        return self.compute != self.master

    def text(self) -> str:
        """One line for logs and the checkpoint's manifest."""
        return ", ".join(f"{name} {_short(getattr(self, name))}" for name in self.__dataclass_fields__)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))


def policy_from(precision: str, *, aligned: bool) -> PrecisionPolicy:
    """The policy of a Trainer's ``precision`` string under the plain or the aligned form of a strategy.

    Args:
        precision: one of `PRECISIONS`.
        aligned: whether masters, reduction and accumulation must be fp32 whatever the string says.

    Raises:
        PrecisionError: any other string, with the list of those that run.
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    if precision == "32-true":
        return PrecisionPolicy(compute=fp32, master=fp32, reduce=fp32, accumulate=fp32)
    if precision == "bf16-mixed" or (precision == "bf16-true" and aligned):
        return PrecisionPolicy(compute=bf16, master=fp32, reduce=fp32, accumulate=fp32)
    if precision == "bf16-true":
        return PrecisionPolicy(compute=bf16, master=bf16, reduce=bf16, accumulate=bf16)
    hint = ""
    if precision in ("16-mixed", "16-true"):
        hint = " fp16 needs a loss scale, which these strategies do not have: use 'bf16-mixed'."
    raise PrecisionError(
        f"precision is {precision!r}, which this strategy does not run. Use one of "
        f"{', '.join(repr(p) for p in PRECISIONS)}.{hint}"
    )
