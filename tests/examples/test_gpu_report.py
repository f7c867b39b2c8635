"""The report on a machine's GPUs, run on CPUs at the tiniest size; no time is looked at."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import gpu_report
from examples.benchmarks.gpu_report import Machine, parse_arguments, parts_of

GIB = 2**30
MACHINE = Machine(device="cpu", processes=2, memory=16 * GIB, host=64 * GIB)


def _options(*arguments: str) -> argparse.Namespace:
    return parse_arguments(["--device", "cpu", *arguments])


def test_checks_come_first_and_every_size_has_its_races() -> None:
    titles = [part.title for part in parts_of(MACHINE, _options())]
    assert titles[:3] == ["Do the engines agree in bf16-mixed?", "Do the engines agree in 32-true?", "1B, fsdp"]
    assert len(titles) == len(set(titles))
    for size in ("1B", "3B", "8B"):
        assert {f"{size}, fsdp", f"{size}, fsdp, compiled, selective", f"{size}, shard_fsdp: memory"} <= set(titles)
    few = parts_of(MACHINE, _options("--sizes", "tiny", "--parts", "speed", "--races", "ddp", "stage_1", "--forms"))
    assert [part.title for part in few] == ["tiny, ddp", "tiny, stage_1"]


@pytest.mark.matrix
def test_the_report_of_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("greenlet")
    sizes: dict[str, Any] = {"sizes": "tiny", "seq-len": 16, "races": "fsdp", "rounds": 2, "steps": 1}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    arguments = ["--device", "cpu", *given, "--forms", "selective", "--peak-tflops", "0.01", "--output", str(tmp_path)]
    assert gpu_report.main(arguments) == 0
    page = (tmp_path / "gpu_report.md").read_text()
    assert page.count("all is equal") == 2
    assert page.count("one loss of rank 0 times 1.01     found") == 2
    for contestant in ("hand_fsdp", "lightning_model_parallel", "shard_fsdp", "shard_fsdp_aligned"):
        assert page.count(f"\n| {contestant} | ") == 2  # plain and selective
    assert "| tiny, shard_fsdp | " in page
    assert page.endswith("## Left out\n\nNothing.\n")
    assert (tmp_path / "gpu_report.png").read_bytes().startswith(b"\x89PNG")
