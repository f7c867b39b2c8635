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
from tests.checkpoint.calls import load_module, trainer_state
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


@pytest.fixture(scope="module")
def others(written) -> list[dict[str, Any]]:
    return run_distributed(other_loads, 2, str(written[0]))


def other_loads(folder: str) -> dict[str, Any]:
    """Loads and saves of a rank under two ranks."""
    found: dict[str, Any] = {}
    for form in ("stage 1", "stage 3"):
        run = build(form, 1, lr=0.5)
        load_run(run, f"{folder}/dtensor 3.ckpt")
        run.steps = BEFORE
        found[f"fresh {form}"] = run.step(AFTER).values()
    # fp32 whole -> bf16 flat partitions -> fp32 flat partitions
    low, back = build("stage 3", 1, dtype=torch.bfloat16).step(1), build("stage 1", 2)
    load_run(low, f"{folder}/whole 1.ckpt")
    found["low"] = low.values()
    save_run(low, f"{folder}/low.ckpt")
    load_run(back, f"{folder}/low.ckpt")
    found["back"] = back.values()
    # an optimizer that counts its steps in an int, as DeepSpeed's own for the CPU do
    run = build("stage 1", 0).step(BEFORE)
    states = torch_optimizer(run.optimizer).state
    for state in states.values():
        state["step"] = int(state["step"])
    save_run(run, f"{folder}/numbers.ckpt")
    for state in states.values():
        state["step"] = 0
    load_run(run, f"{folder}/whole 1.ckpt")
    found["counts"] = [state["step"] for state in states.values()]
    fresh = build("stage 3", 1)
    load_run(fresh, f"{folder}/numbers.ckpt")
    found["numbers"] = fresh.values()
    # a tied parameter by its other name
    run, other = build("stage 1", 0).step(1), build("stage 3", 1)
    for each in (run, other):
        each.masters["head.weight"] = each.masters.pop("embed.weight")
    save_run(run, f"{folder}/tied.ckpt")
    load_run(other, f"{folder}/tied.ckpt")
    found["tied"] = other.values()
    # weights alone
    run = build("stage 1", 1).step(1)
    state = torch_optimizer(run.optimizer).state[run.flats()[0].flat]["exp_avg"]
    before = state.clone(), run.net.body.weight.clone()
    load_module(f"{folder}/stage 3 3.ckpt", module=run.net, masters=run.masters)
    found["kept"] = torch.equal(state, before[0]) and torch.equal(run.net.body.weight, before[1])
    found["weights"] = {key: value for key, value in run.values().items() if key.startswith("model.")}
    return found


@pytest.mark.parametrize("form", ["stage 1", "stage 3"])
def test_slots_are_made_where_there_are_none(written, others, form):
    for found in others:
        assert_equal(found[f"fresh {form}"], written[2])


def test_state_follows_its_parameters_to_another_dtype(written, others):
    for found in others:
        low, back = found["low"], found["back"]
        for key, tensor in written[1].items():
            rounds = tensor.is_floating_point() and not key.endswith(".step")
            assert low[key].dtype == (torch.bfloat16 if rounds else tensor.dtype), key
            assert back[key].dtype == tensor.dtype, key
            expected = tensor.to(torch.bfloat16) if rounds else tensor
            assert torch.equal(low[key], expected), key
            assert torch.equal(back[key], expected.to(tensor.dtype)), key


def test_a_step_count_is_a_scalar_in_the_checkpoint_and_a_number_where_it_was_one(written, others):
    folder, before, _ = written
    for found in others:
        assert found["counts"] == [BEFORE, BEFORE]
        assert all(type(count) is int for count in found["counts"])
        assert_equal(found["numbers"], before)
    assert_equal(stored(f"{folder}/numbers.ckpt"), before)
    assert trainer_state(f"{folder}/numbers.ckpt")["optimizer_states"][0]["slots"] == {}


def test_a_tied_parameter_goes_by_any_of_its_names(written, others):
    path = f"{written[0]}/tied.ckpt"
    assert read_manifest(path).aliases == {"model.head.weight": "model.embed.weight"}
    assert_equal(others[0]["tied"], stored(path))


def test_weights_alone_go_to_the_masters_and_not_to_the_copies_of_the_module(written, others):
    expected = {key: tensor for key, tensor in written[1].items() if key.startswith("model.")}
    for found in others:
        assert found["kept"]
        assert_equal(found["weights"], expected)
