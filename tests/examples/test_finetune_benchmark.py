"""Docstrings as labelled data, and the benchmark that fine-tunes a classifier on them; no time is looked at."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import docstrings as data
from examples.benchmarks import finetune
from examples.benchmarks.finetuning import FineTuning, train, trial
from examples.benchmarks.limits import Trial
from examples.benchmarks.processes import MEBIBYTE, Failed, Place
from tests.harness import run_distributed

# Docstrings


def test_each_docstring_is_in_one_part_and_has_one_label() -> None:
    train, validation = data.divided(0.25)
    texts = [text for text, _ in train + validation]
    assert len(set(texts)) == len(texts) > 800
    for part in (train, validation):
        counts = Counter(label for _, label in part)
        assert set(counts) == set(range(len(data.PACKAGES)))
        assert len(set(counts.values())) == 1, "a guess is right more often for one than for another"
    # A quarter, up to chance and to what the smallest package has.
    assert 0.15 < len(validation) / len(texts) < 0.35
    assert not [text for text in texts if any(name in text.lower() for name in data.PACKAGES)]


# Runs


def _run(encoder: str, **options: Any) -> FineTuning:
    fixed: dict[str, Any] = {"precision": "32-true", "device": "cpu", "processes": 2, "max_length": 8}
    return FineTuning(encoder=encoder, **fixed, **options)


def _train(encoder: str) -> tuple[Any, ...]:
    place = Place(rank=dist.get_rank(), device=torch.device("cpu"))
    return (
        train(place, "shard_ddp", _run(encoder, batch_size=8, limit=32, epochs=2)),
        # No process fits into less than nothing.
        trial(place, "shard_ddp", _run(encoder, batch_size=1), -4096 * MEBIBYTE),
    )


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_epochs_are_timed_and_told_with_what_was_learned(encoder: Path) -> None:
    for found, trial_without_memory in run_distributed(_train, 2, str(encoder)):
        assert found["samples"] == 32
        assert len(found["epochs"]) == 2
        for epoch in found["epochs"]:
            assert epoch["train_seconds"] > 0
            assert epoch["evaluation_seconds"] > 0
            assert 0 <= epoch["f1"] <= 1
            # Of 32 docstrings.
            assert epoch["accuracy"] * 32 == pytest.approx(round(epoch["accuracy"] * 32), abs=1e-4)
        assert trial_without_memory is None


# Tables


def _measured(seconds: float, samples: int) -> dict[str, Any]:
    epochs = [
        {"train_seconds": seconds * (1 + index), "evaluation_seconds": 1.0, "accuracy": 0.4 + index / 10, "f1": 0.5}
        for index in range(2)
    ]
    return {"epochs": epochs, "samples": samples}


def test_an_engine_that_does_not_run_leaves_the_others(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def attempt(name: str, run: FineTuning, limit: int) -> Trial | None:
        if name == "absent":
            raise Failed("ModuleNotFoundError: No module named 'absent'")
        fits = run.batch_size <= {"first": 5, "second": 11, "late": 3, "large": 0}[name]
        return Trial(size=run.batch_size, peak=limit, seconds=1.0) if fits else None

    def run_processes(function: Any, name: str, run: FineTuning, **options: Any) -> list[Any]:
        if name == "late":
            raise Failed("it did not end in 1200 s")
        return [_measured(10.0, 100) if name == "first" else _measured(4.0, 80)]

    monkeypatch.setattr(finetune, "attempt", attempt)
    monkeypatch.setattr(finetune, "run_processes", run_processes)
    engines = ["--engines", "absent", "large", "late", "first", "second"]
    assert finetune.main(["--encoder", str(encoder), "--output", str(tmp_path), "--repeats", "2", *engines]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "absent did not run: ModuleNotFoundError: No module named 'absent'" in said
    assert "large: not even one sample fits into 608 MiB" in said
    assert said.count("late did not run: it did not end in 1200 s") == 1
    first, second = csv.DictReader((tmp_path / "finetune.csv").open())
    assert (first["engine"], first["batch"], first["ratio"]) == ("first", "5", "1.0")
    # 80 samples in 4 s against 100 in 10.
    assert (second["engine"], second["batch"], second["ratio"], second["accuracy"]) == ("second", "11", "2.0", "0.5")
    assert len(list(csv.DictReader((tmp_path / "finetune_epochs.csv").open()))) == 2 * 2 * 2
    assert finetune.main(["--encoder", str(encoder), "--engines", "absent"]) == 1
