"""The precision policy: the dtypes of a run as plain data, the same for every engine."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.errors import PrecisionError
from lightning_shard.precision.float8 import Float8
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.words import PRECISIONS

FLOAT8 = "fp8-mixed"  # For `ShardPrecision` alone. The Trainer's own flag does not know it.
ALL = f"{', '.join(PRECISIONS)}, and by ShardPrecision in plugins {FLOAT8}"
SHORT_FORMS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Lightning's short words for some of its precision strings. 64-true does not run here."""

BITS = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16, "fp8": torch.bfloat16}
"""Compute dtype by the beginning of a precision string, products in float8 aside."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of a policy, by their words in YAML and logs."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes of one run.

    Frozen parameters, buffers and torchmetrics states keep the model's dtype. Inside a forward all parameters,
    trainable or frozen, are seen in ``compute``.

    Raises:
        PrecisionError: fields that contradict each other, or that no engine can do.
    """

    compute: torch.dtype
    """Dtype of parameters, floating inputs and gradients inside forward and backward."""

    master: torch.dtype
    """Dtype of the trainable parameters that the optimizer steps, and so of its state."""

    reduce: torch.dtype
    """Dtype in which gradients cross the network."""

    accumulate: torch.dtype
    """Dtype in which gradients of several micro-batches are summed: the master's if each is reduced, the reduction's if
    they wait for the accumulation boundary."""

    output: torch.dtype | None = None
    """Dtype of modules' outputs in the LightningModule's own code. None: the compute dtype."""

    autocast: torch.dtype | None = None
    """Dtype of ``torch.autocast`` inside of steps, while ``compute`` is fp32. None: no autocast."""

    loss_scale: LossScaling | None = None
    """Loss scaling for fp16 compute with fp32 masters. None: not at all."""

    float8: Float8 | None = None
    """Linear layers with products in float8, while ``compute`` is bf16. None: none."""

    def __post_init__(self) -> None:
        known = ", ".join(DTYPES)
        for name in ("compute", "master", "reduce", "accumulate", "output"):
            dtype = getattr(self, name)
            if dtype not in DTYPES.values() and not (name == "output" and dtype is None):
                raise PrecisionError(f"{name} is {short(dtype)}, but must be one of {known}.")
        self._check("master", "compute", "an optimizer steps parameters in fp32 or in the compute dtype")
        self._check("reduce", "compute", "gradients cross the network in fp32 or in their own dtype")
        if self.accumulate not in (self.master, self.reduce):
            raise PrecisionError(
                f"accumulate is {short(self.accumulate)}, with master {short(self.master)} and reduce "
                f"{short(self.reduce)}, but must be one of these two: gradients are summed after or before reduction."
            )
        if self.output is not None:
            self._check("output", "compute", "modules return their results as computed, or widened")
        if self.autocast is not None and (self.compute, self.master) != (torch.float32, torch.float32):
            raise PrecisionError(
                f"autocast is {short(self.autocast)} while compute is {short(self.compute)} and master "
                f"{short(self.master)}, but both must be fp32: autocast casts each operator's inputs."
            )
        self._check_loss_scale()

    def _check(self, name: str, other: str, reason: str) -> None:
        """Field ``name`` must be fp32 or equal to field ``other``."""
        value, allowed = getattr(self, name), getattr(self, other)
        if value not in (torch.float32, allowed):
            raise PrecisionError(
                f"{name} is {short(value)} while {other} is {short(allowed)}, but must be fp32 or the same: {reason}."
            )

    def _check_loss_scale(self) -> None:
        # torch.amp.GradScaler refuses fp16 gradients too.
        scales = self.products == torch.float16 and self.master != torch.float16
        if (self.loss_scale is not None) != scales:
            state = "is not set" if scales else "is set"
            raise PrecisionError(
                f"loss_scale {state} while compute is {short(self.products)} and master {short(self.master)}, but goes "
                "with compute fp16 and master fp32, and only with them: fp16 gradients below 6e-8 are zero, and fp16 "
                "masters' gradients underflow again when they are scaled back. Use precision '16-mixed'."
            )

    @property
    def products(self) -> torch.dtype:
        """Dtype of matrix products, at least in linear layers."""
        return torch.float8_e4m3fn if self.float8 is not None else self.autocast or self.compute

    @property
    def is_low_memory(self) -> bool:
        """Whether the optimizer steps 16-bit parameters, so that updates below their spacing are lost."""
        return self.master != torch.float32

    def text(self) -> str:
        """One line for logs and the checkpoint's manifest."""
        shown = [f"{name} {short(getattr(self, name))}" for name in ("compute", "master", "reduce", "accumulate")]
        shown += ["buffers as loaded", f"output {short(self.output or self.compute)}"]
        if self.autocast is not None:
            shown.append(f"autocast {short(self.autocast)}")
        if self.loss_scale is not None:
            shown.append("loss scale dynamic")
        if self.float8 is not None:
            emulated = ", emulated" if self.float8.emulate else ""
            shown.append(f"linear layers {self.float8.pattern!r} fp8 ({self.float8.recipe}{emulated})")
        return ", ".join(shown)


def autocasting(policy: PrecisionPolicy, device_type: str, *, cache: bool) -> AbstractContextManager[Any]:
    """The context of the LightningModule's own code: ``torch.autocast`` if the policy has it, or for fp32 outputs that
    meet cast parameters. Modules switch it off (`install_casts`). ``cache`` keeps a parameter's cast, which is wrong if
    its memory is freed in the step.
    """
    if policy.autocast is not None:
        return torch.autocast(device_type, dtype=policy.autocast, cache_enabled=cache)
    if policy.output not in (None, policy.compute):
        return torch.autocast(device_type, dtype=policy.compute, cache_enabled=False)
    return nullcontext()


def short(dtype: torch.dtype) -> str:
    """``"bf16"`` and the like, or torch's own name of a dtype without one here."""
    return {d: name for name, d in DTYPES.items()}.get(dtype, str(dtype).removeprefix("torch."))


def policy_from(
    precision: str,
    *,
    aligned: bool,
    reduce: torch.dtype | None = None,
    output: torch.dtype | None = None,
    loss_scale: LossScaling | None = None,
    autocast: bool = False,
    float8: Float8 | None = None,
    at_boundary: bool = False,
) -> PrecisionPolicy:
    """The policy of a Trainer's ``precision``, one of `PRECISIONS` or `FLOAT8`, plain or aligned, with
    ``ShardPrecision``'s overrides. Plain ``16-true`` has no loss scale: fp16 gradients would underflow again when
    divided. With ``at_boundary`` accumulated gradients wait for one reduction. PrecisionError: impossible overrides.
    """
    if float8 is not None and precision != FLOAT8:
        raise PrecisionError(f"float8 is set with precision {precision!r}, but goes with {FLOAT8!r} alone.")
    bits, form = precision.split("-")
    compute = BITS[bits]
    master = torch.float32 if form == "mixed" or aligned else compute
    if aligned and reduce not in (None, torch.float32):
        raise PrecisionError(
            f"reduce is {short(reduce)} while aligned is true, which holds reduction in fp32. Remove reduce, or use "
            "the plain form of the strategy."
        )
    lower = None
    if autocast:
        if form != "mixed" or bits == "fp8" or output is not None:
            given = f"precision is {precision!r}" if output is None else f"output is {short(output)}"
            raise PrecisionError(
                f"{given} with autocast: true, but autocast runs under 'bf16-mixed' and '16-mixed', and torch's "
                "rules decide its outputs. Set one of these, without output, or remove autocast."
            )
        lower, compute = compute, torch.float32
    reduce = master if reduce is None else reduce
    if loss_scale is None and (lower or compute) == torch.float16 and master == torch.float32:
        loss_scale = LossScaling()
    return PrecisionPolicy(
        compute=compute,
        master=master,
        reduce=reduce,
        accumulate=reduce if at_boundary else master,
        output=output or master,
        autocast=lower,
        loss_scale=loss_scale,
        float8=(float8 or Float8()) if precision == FLOAT8 else None,
    )
