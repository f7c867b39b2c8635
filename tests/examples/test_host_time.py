"""A step's Python calls beside those of the loop by hand, so that nothing walks modules or parameters again."""

from __future__ import annotations

import warnings
from inspect import getattr_static
from types import GetSetDescriptorType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.benchmarks.host_time import RACES, WARMUP, calls_of_step, workload
from examples.benchmarks.processes import Place
from examples.benchmarks.turns import Plan
from examples.benchmarks.variants import build_variant
from tests.groups import sampled
from tests.harness import run_distributed

BLOCKS = 32  # 291 parameters
SHARE = 1.10
"""Of the calls by hand. Casts at modules with parameters and the end of units' backward passes take 3 to 5 %, and one
walk over the modules 3 % of a step under FSDP, more the deeper they lie."""
TRAINER = 2_500
"""Calls of Lightning's loops, hooks and logging, 1,100 to 2,000 under its own strategies; the same for any number of
parameters."""


def count(race: str) -> list[int]:
    place = Place(rank=dist.get_rank(), device=torch.device("cpu"))
    work, plan = workload(BLOCKS, race, processes=2), Plan(rounds=1, steps=1, warmup=WARMUP)
    calls = []
    warnings.simplefilter("ignore")  # the harness shows each, by calls of its own
    by_hand, _, ours, _ = RACES[race]
    for name in (by_hand, ours):
        contestant = build_variant(name, work, place, plan)
        contestant.run(WARMUP)
        calls.append(calls_of_step(contestant).total())
        for kind in (Tensor, nn.Parameter, DTensor):
            # In C, so that a fit makes gradients of other models no slower to read.
            assert isinstance(getattr_static(kind, "grad"), GetSetDescriptorType)
        contestant.end()
    return calls


@pytest.mark.matrix
@pytest.mark.parametrize("race", sampled(["fsdp", "stage_2", "ddp", "stage_3"], 0))
def test_calls_of_a_steady_step(race: str) -> None:
    for by_hand, ours in run_distributed(count, 2, race, timeout=190):
        assert ours <= SHARE * by_hand + TRAINER, (ours, by_hand)
