"""The runs of `test_gpu` that several devices share, on two CPU processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.benchmarks.processes import run_processes
from tests.strategies import on_devices
from tests.strategies.on_devices import CASES, HYBRID

pytestmark = pytest.mark.matrix
CPUS = {"processes": 2, "device": "cpu", "timeout": 600.0}


@pytest.mark.parametrize("case", list(CASES))
def test_cases(case: str) -> None:
    offloads = ["shard_fsdp_offload_aligned", "shard_deepspeed_stage_2_offload_aligned"]
    names = offloads if "wide" in case or "dimension" in case else ["shard_ddp_aligned", HYBRID]
    model = {"rows": 74} if "wide" in case else {}
    if case == "wide, by hand":
        model["every"] = 2
    for found in run_processes(on_devices.alike, names, "bf16-mixed", case, model, **CPUS):
        assert found == dict.fromkeys(names, 0.0)


def test_saves_resumes_and_steady_steps(tmp_path: Path) -> None:
    assert run_processes(on_devices.saves, "shard_fsdp", str(tmp_path), **CPUS) == [[], []]
    assert run_processes(on_devices.resumed, "shard_deepspeed_stage_2", "bf16-mixed", str(tmp_path), **CPUS) == [0, 0]
    assert run_processes(on_devices.steady, "shard_ddp", "bf16-mixed", **CPUS) == [3, 3]


def test_memory_that_runs_out() -> None:
    for message in run_processes(on_devices.out_of_memory, "shard_fsdp", **CPUS):
        assert "allocate" in message
        assert "Memory of rank" in message
