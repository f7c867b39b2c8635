"""Steps on full parameters, which travel to their owners and back in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch

from lightning_shard.engines import owner_steps
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences


class Factored(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def _fit(engine: str, bucket: int) -> tuple[Final, int]:
    """What a fit ends with, and the number of buckets on one way."""
    overlapped, numbers = owner_steps._overlapped, list[int]()

    def counted(jobs: Any) -> Iterator[Any]:
        numbers.append(0)
        for each in overlapped(jobs):
            numbers[-1] += 1
            yield each

    pl.seed_everything(1, verbose=False)
    with patch.object(owner_steps, "BUCKET", bucket), patch.object(owner_steps, "_overlapped", counted):
        quiet_trainer(strategy=ENGINES[engine](), max_steps=3, callbacks=[final := Final()]).fit(Factored(), loader())
    return final, max(numbers)


def _both(engine: str) -> tuple[dict[str, Any], list[int]]:
    (one, single), (many, several) = (_fit(engine, bucket) for bucket in (owner_steps.BUCKET, 50))
    return {
        **differences(one.parameters, many.parameters),
        **differences(one.optimizer, many.optimizer),
    }, [single, several]


@pytest.mark.parametrize(
    "engine", ["full", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("zero_2", "zero_3"))]
)
def test_many_buckets_give_what_one_gives(engine: str) -> None:
    for found, (single, several) in run_distributed(_both, 2, engine):
        assert found == {}
        assert single == 1
        assert several > 3  # of which two are under way
