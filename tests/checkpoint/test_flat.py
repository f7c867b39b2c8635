"""Flat partitions as ZeRO keeps them, full parameters and DTensors: one checkpoint, read by each from each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.tensors.flat import torch_optimizer
from tests.checkpoint.calls import trainer_state
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.flat import FORMS, Run, build, padding
from tests.checkpoint.flat_runs import load_run, save_run
from tests.groups import sampled
from tests.harness import run_distributed

BEFORE, AFTER = 3, 2
WRITERS = [("whole", 1), *((form, 3) for form in FORMS if form != "whole")]


def save_trained(folder: str) -> None:
    for form, ranks in WRITERS:
        if ranks == dist.get_world_size():
            save_run(build(form, 0).step(BEFORE), f"{folder}/{form} {ranks}.ckpt")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A folder with the checkpoint of each writer, and what they must all hold, before and after more steps."""
    folder = tmp_path_factory.mktemp("flat")
    run = build("whole", 0).step(BEFORE)
    save_run(run, f"{folder}/whole 1.ckpt")
    run_distributed(save_trained, 3, str(folder))
    return folder, run.values(), run.step(AFTER).values()


@pytest.mark.parametrize(("form", "ranks"), WRITERS)
def test_every_form_and_number_of_ranks_writes_the_same(written, form, ranks):
    folder, before, _ = written
    slots = {key.rpartition(".")[2] for key in before if key.startswith("optimizer.0.body.bias")}
    assert slots == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert before["optimizer.0.scale.step"].dtype == torch.float32
    path, first = f"{folder}/{form} {ranks}.ckpt", f"{folder}/whole 1.ckpt"
    assert_equal(stored(path), before)
    assert read_manifest(path).aliases == {"model.head.weight": "model.embed.weight"}
    assert read_manifest(path).tensors == read_manifest(first).tensors
    described = trainer_state(path)["optimizer_states"]
    assert described == trainer_state(first)["optimizer_states"]
    assert described[0]["groups"][0]["params"] == ["embed.weight", "body.weight", "frozen", "kernel", "row"]


def live_slots(run: Run) -> dict[tuple[int, str], Tensor]:
    state = torch_optimizer(run.optimizer).state
    return {(id(stepped), slot): value for stepped, slots in state.items() for slot, value in slots.items()}


def load_each(form: str, folder: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]]:
    """From every checkpoint into a run of another seed that has state of its own, and some steps more."""
    results = []
    for writer, ranks in WRITERS:
        run = build(form, 1, lr=0.5).step(1)
        slots = live_slots(run)
        for value in slots.values():
            value.detach().fill_(torch.nan)  # padding too
        report = load_run(run, f"{folder}/{writer} {ranks}.ckpt")
        assert (report.missing, report.unexpected) == ((), ())
        now = live_slots(run)
        run.steps = BEFORE
        loaded = run.values()
        facts = {
            "in place": slots.keys() == now.keys() and all(slots[key] is now[key] for key in slots),
            "padding": bool(padding(run).any()) if run.masters else False,
        }
        results.append((loaded, run.step(AFTER).values(), facts))
    return results


@pytest.mark.parametrize("form", sampled(FORMS, FORMS.index("stage 1"), FORMS.index("dtensor")))
@pytest.mark.parametrize("ranks", sampled([1, 2, 3], 1))
def test_each_form_goes_on_bitwise_from_each(written, form, ranks):
    folder, before, after = written
    for results in run_distributed(load_each, ranks, form, str(folder)):
        for writer, (loaded, stepped, facts) in zip(WRITERS, results, strict=True):
            assert_equal(loaded, before, writer)
            assert_equal(stepped, after, writer)
            assert facts == {"in place": True, "padding": False}, writer
