"""The runs of `test_gpu` that several devices share, on two CPU processes, or on a stand-in for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.benchmarks.processes import Place, run_processes
from tests import stand_in
from tests.harness import run_distributed
from tests.strategies import on_devices
from tests.strategies.on_devices import CASES, HYBRID

pytestmark = [] if stand_in.chosen() else [pytest.mark.matrix]


def on_two(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function`` returns for the place of each process, and ``arguments``."""
    if stand_in.chosen():
        return run_distributed(_placed, 2, function, *arguments, timeout=300)
    return run_processes(function, *arguments, processes=2, device="cpu", timeout=600.0)


def _placed(function: Callable[..., Any], *arguments: Any) -> Any:
    rank = dist.get_rank()
    return function(Place(rank=rank, device=torch.device(stand_in.NAME, rank)), *arguments)


@pytest.mark.parametrize("case", list(CASES))
def test_cases(case: str) -> None:
    offloads = ["shard_fsdp_offload_aligned", "shard_deepspeed_stage_2_offload_aligned"]
    names = offloads if "wide" in case or "scalar" in case else ["shard_ddp_aligned", HYBRID]
    model = {"rows": 74} if "wide" in case else {}
    if case == "wide, by hand":
        model["every"] = 2
    for found in on_two(on_devices.alike, names, "bf16-mixed", case, model):
        assert found == dict.fromkeys(names, 0.0)


def test_saves_resumes_and_steady_steps(tmp_path: Path) -> None:
    assert on_two(on_devices.saves, "shard_fsdp", str(tmp_path)) == [[], []]
    assert on_two(on_devices.resumed, "shard_deepspeed_stage_2", "bf16-mixed", str(tmp_path)) == [0, 0]
    assert on_two(on_devices.steady, "shard_ddp", "bf16-mixed") == [3, 3]
