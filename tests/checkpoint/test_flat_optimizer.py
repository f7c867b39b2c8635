"""Optimizer state in flat partitions: step counts, parameters without state, and what can't be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatOptimizer, torch_optimizer
from tests.checkpoint.flat import build
from tests.checkpoint.flat_runs import load_run, save_run
from tests.harness import run_distributed

STEPS = 3


def save_all(folder: str) -> None:
    """Full parameters, of which some had other steps than the rest."""
    for name, skipped in (("uneven", 1), ("without", STEPS)):  # no gradient in the first steps, or ever
        save_run(build("whole", 0).step(skipped, skip=("body.bias",)).step(STEPS - skipped), f"{folder}/{name}.ckpt")


LOADS = [
    ("stage 1", "uneven", False),
    ("stage 3", "uneven", False),
    ("dtensor", "uneven", True),
    ("stage 1", "without", True),
    ("stage 1", "without", False),
    ("dtensor", "without", False),
]


def load_all(folder: str) -> dict[Any, tuple[str, bool, dict[str, Tensor]]]:
    """Form, checkpoint and ``strict`` to what is said, whether nothing changed, and the values."""
    found = {}
    for form, name, strict in LOADS:
        run = build(form, 1).step(1)
        before = run.values()
        try:
            report = load_run(run, f"{folder}/{name}.ckpt", strict=strict)
            said = f"missing {report.missing} unexpected {report.unexpected}"
        except CheckpointMismatchError as error:
            said = str(error)
        after = run.values()
        unchanged = after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
        found[form, name, strict] = said, unchanged, after
    return found


NOTHING = "missing () unexpected ()"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("loaded")
    save_all(str(folder))
    return run_distributed(load_all, 2, str(folder))


def test_parameters_with_other_step_counts_do_not_share_a_flat_tensor(loaded):
    for found in loaded:
        for form in ("stage 1", "stage 3"):
            said, unchanged, _ = found[form, "uneven", False]
            assert "step of optimizer 0 is 2.0 for body.bias and 3.0 for head.bias" in said
            assert "ZeRO keeps one step per flat group" in said
            assert unchanged
        said, _, values = found["dtensor", "uneven", True]
        assert said == NOTHING
        assert values["optimizer.0.body.bias.step"].item() == 2


def test_a_parameter_without_state_begins_with_zeros_and_the_step_of_its_flat_tensor(loaded):
    slots = [f"optimizer.0.body.bias.{slot}" for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    for found in loaded:
        for strict in (True, False):
            said, unchanged, values = found["stage 1", "without", strict]
            assert said == NOTHING
            assert not unchanged
            assert not any(values[slot].any() for slot in slots)
            assert values["optimizer.0.head.bias.exp_avg"].any()
            assert values["optimizer.0.body.bias.step"].item() == STEPS
        said, _, values = found["dtensor", "without", False]
        assert said == NOTHING
        assert slots[0] not in values
        assert values["optimizer.0.head.bias.exp_avg"].any()


def refused(path: str) -> list[str]:
    messages = []
    for change in ("slot", "list", "name", "master"):
        run = build("stage 1", 0).step(1)
        group = run.flats()[0]
        state = torch_optimizer(run.optimizer).state[group.flat]
        if change == "slot":
            state["rows"] = torch.ones(7, 5)  # of the shape of a parameter in it, but not cut as it is
        elif change == "list":
            state["history"] = [torch.ones(2)]
        elif change == "name":
            member = FlatMember(fqn="module.body.weight", shape=(3, 5))
            strange = FlatGroup(flat=group.flat, members=(member,), group=group.group)
            run.optimizer = FlatOptimizer(optimizer=torch_optimizer(run.optimizer), groups=[strange])
        else:
            run.masters["module.body.weight"] = run.masters["body.weight"]
        with pytest.raises(CheckpointError) as caught:
            save_run(run, path)
        messages.append(str(caught.value))
    return messages


def test_what_can_not_be_saved_is_refused_by_name(tmp_path):
    for slot, history, name, master in run_distributed(refused, 2, str(tmp_path / "a.ckpt")):
        assert "optimizer.0.embed.weight.rows has shape (7, 5)" in slot
        assert "optimizer.0.embed.weight.history has shape of a list of tensors" in history
        assert name == master
        assert "the module has no parameter 'module.body.weight'. Did you mean" in name
    assert list(tmp_path.iterdir()) == []
