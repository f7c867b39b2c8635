"""The precisions and the facts of a model that the tests of plans share."""

from __future__ import annotations

import torch

from lightning_shard.planning.model_facts import ModelFacts, ParameterFacts
from lightning_shard.precision.policy import policy_from

FP32 = policy_from("32-true", aligned=False)
BF16 = policy_from("bf16-mixed", aligned=False)


def model(*sizes: int, units: int = 0) -> ModelFacts:
    """Matrices of these many rows and 10 columns, the last ones in units of their own."""
    names = ["" if i < len(sizes) - units else f"unit {i}" for i in range(len(sizes))]
    return ModelFacts(
        parameters=tuple(
            ParameterFacts(fqn=f"p{i}", shape=(rows, 10), dtype=torch.float32, unit=name)
            for i, (rows, name) in enumerate(zip(sizes, names, strict=True))
        )
    )
