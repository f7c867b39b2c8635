"""Optimizer state in flat partitions: step counts, parameters without state, and what can't be saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import FlatGroup, FlatMember, FlatOptimizer, torch_optimizer
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.flat import Net, Run, build, flat_with, masters_of
from tests.checkpoint.flat_runs import load_run, save_run
from tests.checkpoint.test_flat import BEFORE
from tests.harness import run_distributed


def small_flat(first: list[int], *, steps: int) -> Run:
    """``scale`` and ``row``, 5 elements, of which rank ``r`` has those from ``first[r]`` to ``first[r + 1]``."""
    net = Net(0)
    rank = dist.get_rank()
    parameters = {"scale": net.scale, "row": net.row}
    values = torch.cat([p.detach().flatten() for p in parameters.values()])
    flat, members = flat_with(values[first[rank] : first[rank + 1]], first[rank], parameters)
    adam = torch.optim.Adam([flat], lr=0.1)
    run = Run(
        net, FlatOptimizer(optimizer=adam, groups=[FlatGroup(flat=flat, members=members, group=adam.param_groups[0])])
    )
    run.masters = masters_of(run.flats())
    for _ in range(steps if len(flat) else 0):
        flat.grad = values[first[rank] : first[rank + 1]] + 1
        adam.step()
    return run


def save_small(path: str, first: list[int]) -> None:
    run = small_flat(first, steps=4)
    flat = run.flats()[0].flat
    assert (flat in torch_optimizer(run.optimizer).state) == (len(flat) > 0)
    save_run(run, path)


def load_small(path: str, first: list[int]) -> dict[str, Tensor]:
    run = small_flat(first, steps=0)
    load_run(run, path)
    return run.values()


@pytest.mark.parametrize("first", [[0, 0, 1, 5], [0, 5, 5, 5], [0, 2, 5, 5]])
def test_a_rank_without_elements_has_no_state_and_takes_none_away(tmp_path, first):
    path = str(tmp_path / "a.ckpt")
    run_distributed(save_small, 3, path, first)
    tensors = stored(path)
    assert {key for key in tensors if key.startswith("optimizer.")} == {
        f"optimizer.0.{name}.{slot}" for name in ("scale", "row") for slot in ("step", "exp_avg", "exp_avg_sq")
    }
    assert tensors["optimizer.0.row.step"].item() == tensors["optimizer.0.scale.step"].item() == 4
    for values in run_distributed(load_small, 3, path, [0, 1, 1, 5]):
        assert_equal(values, tensors)


def save_uneven(path: str, skipped: int) -> None:
    """A parameter that had no gradient in the first steps, or ever."""
    save_run(build("whole", 0).step(skipped, skip=("body.bias",)).step(BEFORE - skipped), path)


def try_to_load(form: str, path: str, strict: bool) -> tuple[str, bool, dict[str, Tensor]]:
    run = build(form, 1).step(1)
    before = run.values()
    message = ""
    try:
        report = load_run(run, path, strict=strict)
        message = str(report.missing)
    except CheckpointMismatchError as error:
        message = str(error)
    after = run.values()
    return message, all(torch.equal(after[key], before[key]) for key in before), after


@pytest.mark.parametrize("form", ["stage 1", "stage 3"])
def test_parameters_with_other_step_counts_do_not_share_a_flat_tensor(tmp_path, form):
    path = str(tmp_path / "a.ckpt")
    run_distributed(save_uneven, 1, path, 1)
    for message, unchanged, _ in run_distributed(try_to_load, 2, form, path, False):
        assert "step of optimizer 0 is 2.0 for body.bias and 3.0 for head.bias" in message
        assert "ZeRO keeps one step per flat group" in message
        assert unchanged
    for message, unchanged, values in run_distributed(try_to_load, 2, "dtensor", path, True):
        assert message == "()"
        assert not unchanged
        assert values["optimizer.0.body.bias.step"].item() == 2


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_without_state_begins_with_zeros_and_the_step_of_its_flat_tensor(tmp_path, strict):
    path = str(tmp_path / "a.ckpt")
    run_distributed(save_uneven, 1, path, BEFORE)
    slots = [f"optimizer.0.body.bias.{slot}" for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    for message, unchanged, values in run_distributed(try_to_load, 2, "stage 1", path, strict):
        assert message == "()"
        assert not unchanged
        assert not any(values[slot].any() for slot in slots)
        assert values["optimizer.0.head.bias.exp_avg"].any()
        assert values["optimizer.0.body.bias.step"].item() == BEFORE
    for message, _, values in run_distributed(try_to_load, 2, "dtensor", path, False):
        assert message == "()"
        assert slots[0] not in values
        assert values["optimizer.0.head.bias.exp_avg"].any()


def save_fewer(path: str) -> None:
    run = build("whole", 0)
    run.optimizer = torch.optim.AdamW([p for name, p in run.net.named_parameters() if name != "kernel"])
    save_run(run.step(1), path)


def test_a_parameter_that_was_not_stepped_is_missing(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_distributed(save_fewer, 1, path)
    for message, unchanged, _ in run_distributed(try_to_load, 2, "stage 3", path, True):
        assert "missing in the checkpoint (1): optimizer.0.kernel\n" in message
        assert unchanged


def save_thawed(path: str) -> None:
    run = build("whole", 0)
    run.net.frozen.requires_grad_()
    run.net.frozen.grad = torch.ones_like(run.net.frozen)
    torch_optimizer(run.optimizer).step()
    save_run(run, path)


def load_frozen(path: str) -> tuple[str, tuple[str, ...]]:
    run = build("stage 3", 1)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_run(run, path)
    return str(caught.value), load_run(run, path, strict=False).unexpected


def test_saved_state_of_a_parameter_that_is_frozen_now_is_unexpected(tmp_path):
    path = str(tmp_path / "a.ckpt")
    run_distributed(save_thawed, 1, path)
    keys = tuple(f"optimizer.0.frozen.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step"))
    for message, unexpected in run_distributed(load_frozen, 2, path):
        assert f"unexpected in the checkpoint (3): {', '.join(keys)}" in message
        assert unexpected == keys


def test_no_state_at_all_drops_the_live_state(tmp_path):
    assert run_distributed(state_after_loading_none, 2, str(tmp_path / "a.ckpt")) == [0, 0]


def state_after_loading_none(path: str) -> int:
    save_run(build("whole", 0), path)
    run = build("stage 1", 1).step(1)
    load_run(run, path)
    return len(torch_optimizer(run.optimizer).state)


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
        assert "optimizer.0.embed.weight.history is a list of tensors" in history
        assert name == master
        assert "the module has no parameter 'module.body.weight'. Did you mean" in name
    assert list(tmp_path.iterdir()) == []
