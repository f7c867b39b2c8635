"""Words for precisions and dtypes, which commands read without torch."""

from typing import Literal, get_args

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
"""The Trainer's strings that run."""

DType = Literal["fp32", "bf16", "fp16"]
"""The dtypes of a policy. `lightning_shard.precision.policy.DTYPES` has torch's."""
