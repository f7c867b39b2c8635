"""Tensors of a module by name: under every wrapper, tied, missing, reshaped, and not to be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_shard.checkpoint.matching import LoadReport
from lightning_shard.checkpoint.optimizer_state import extra_state, left_out, load_extra_state
from lightning_shard.checkpoint.state_dict import OfferedState
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.names import fqns
from tests.checkpoint.calls import load_into, load_module, save_module, save_tensors
from tests.checkpoint.wrapped import ALIASES, BUFFERS, PARAMETERS, Net, trained, wrapped
from tests.harness import run_distributed


def names_under(how: str) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    net = wrapped(how)
    names = fqns(net)
    load_extra_state(net, names, {"extra._extra_state": {"seen": 7}})
    return list(names.tensors), dict(names.aliases), extra_state(net, names)


WRAPPERS = ["plain", "ddp inner", "fsdp", "fsdp inner compile"]


def names_under_all() -> list[Any]:
    return [names_under(how) for how in WRAPPERS]


def test_names_are_those_of_the_unwrapped_module():
    for how, (tensors, aliases, extra) in zip(WRAPPERS, run_distributed(names_under_all, 1)[0], strict=True):
        assert tensors == PARAMETERS + BUFFERS, how
        assert aliases == ALIASES, how
        assert extra == {"extra._extra_state": {"seen": 7}}, how


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_states_of_metrics_that_ask_for_it_are_kept():
    net = nn.Module()
    net.mean = MeanMetric()
    net.mean.persistent(True)
    net.mean.update(torch.tensor([1.0, 2.0]))
    other = nn.Module()
    other.mean = MeanMetric()
    other.mean.persistent(True)
    extra = extra_state(net, fqns(net))
    load_extra_state(other, fqns(other), extra)
    linear = nn.Linear(1, 1)
    assert other.mean.compute() == 1.5
    with pytest.raises(CheckpointMismatchError, match=r"no module takes: mean\.\w+, mean\.\w+; load with strict=False"):
        load_extra_state(linear, fqns(linear), extra)
    load_extra_state(linear, fqns(linear), extra, strict=False)


@pytest.mark.parametrize(("saved_tied", "live_tied"), [(True, False), (False, True)])
def test_tying_may_differ(tmp_path, saved_tied, live_tied):
    net = Net(tie=saved_tied)
    adam = torch.optim.AdamW(net.parameters())
    trained(net, [adam])
    save_module(tmp_path / "a.ckpt", module=net, optimizers=[adam])
    other = Net(tie=live_tied, seed=1)
    adam_of_other = torch.optim.AdamW(other.parameters())
    strict = saved_tied
    report = load_module(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other], strict=strict)[1]
    assert torch.equal(other.embed.weight, net.embed.weight)
    assert torch.equal(adam_of_other.state[other.embed.weight]["exp_avg"], adam.state[net.embed.weight]["exp_avg"])
    if saved_tied:
        assert torch.equal(other.head.weight, net.head.weight)
        assert other.head.weight is not other.embed.weight
        assert torch.equal(adam_of_other.state[other.head.weight]["exp_avg"], adam.state[net.head.weight]["exp_avg"])
        assert report == LoadReport()
    else:
        assert report.unexpected == ("model.head.weight", "optimizer.0.head.weight")
        with pytest.raises(CheckpointMismatchError, match=r"unexpected in the checkpoint \(1\): model\.head\.weight"):
            load_module(tmp_path / "a.ckpt", module=other)


def test_missing_unexpected_and_reshaped_keys_are_listed_together(tmp_path):
    tensors = {f"model.{name}": torch.ones(2, 3) for name in ("same", "gone", "turned")}
    save_tensors(tmp_path / "a.ckpt", tensors)
    asked = {"model.same": torch.zeros(2, 3), "model.new": torch.zeros(1), "model.turned": torch.zeros(3, 2)}
    with pytest.raises(CheckpointMismatchError) as caught:
        load_into(tmp_path / "a.ckpt", asked)
    assert str(caught.value).splitlines()[1:] == [
        "  missing in the checkpoint (1): model.new",
        "  unexpected in the checkpoint (1): model.gone",
        "  of another shape (1): model.turned (2, 3) there, (3, 2) here",
        "  Give these the shapes that were saved, or reshape the loaded tensors in on_load_checkpoint.",
    ]
    assert asked["model.same"].eq(0).all()
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_into(tmp_path / "a.ckpt", asked, strict=False)
    del asked["model.turned"]
    with pytest.raises(CheckpointMismatchError, match=r"strict=False .* loads those that match"):
        load_into(tmp_path / "a.ckpt", asked)
    report = load_into(tmp_path / "a.ckpt", asked, strict=False)
    assert report == LoadReport(missing=("model.new",), unexpected=("model.gone", "model.turned"))
    assert asked["model.same"].eq(1).all()


def test_a_load_that_matches_nothing_is_an_error(tmp_path):
    save_tensors(tmp_path / "a.ckpt", {"model.a": torch.ones(2)})
    said = r"nothing in .* It asks for model\.b; in the checkpoint there is model\.a"
    with pytest.raises(CheckpointMismatchError, match=said):
        load_into(tmp_path / "a.ckpt", {"model.b": torch.ones(2)}, strict=False)


def test_weights_only(tmp_path):
    net = Net()
    save_module(tmp_path / "w.ckpt", module=net, optimizers=(), trainer_state={"epoch": 1})
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(CheckpointMismatchError, match="no optimizer state: it was saved with weights only"):
        load_module(tmp_path / "w.ckpt", module=net, optimizers=[adam])
    trained(net, [adam])
    save_module(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={"epoch": 1})
    other = Net(seed=1)
    state, report = load_module(tmp_path / "a.ckpt", module=other)
    assert torch.equal(other.scale, net.scale)
    assert other.extra.seen == net.extra.seen == 2
    assert (state["epoch"], report) == (1, LoadReport())


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.ones(2, 2).to_sparse()])
def test_tensors_that_cannot_be_saved(tmp_path, tensor):
    with pytest.raises(CheckpointError, match=r"model\.w is .*; only dense tensors with values can be saved"):
        save_tensors(tmp_path / "a.ckpt", {"model.w": tensor})


def test_loading_into_the_meta_device_is_refused(tmp_path):
    save_tensors(tmp_path / "a.ckpt", {"model.w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"model\.w is on the meta device: materialise"):
        load_into(tmp_path / "a.ckpt", {"model.w": torch.empty(2, device="meta")})


class Filtered(Net):
    """Its ``state_dict()`` leaves parts out, as that of a module with a frozen teacher does."""

    without = ("module.1.", "scale")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith(self.without)}


@pytest.mark.parametrize("name", ["mine", "embed.weight"])
def test_what_on_save_checkpoint_adds_or_replaces_is_refused(name):
    offered = OfferedState(Net())
    state = {**offered.offer({}), name: torch.ones(2)}
    with pytest.raises(CheckpointError, match=f"on_save_checkpoint added or replaced {name} in the state_dict, but"):
        offered.left_out(state)


def test_what_state_dict_leaves_out_keeps_its_values_and_is_told(tmp_path):
    net = Filtered()
    save_module(tmp_path / "a.ckpt", module=net, leave_out=left_out(net, fqns(net)))
    other = Filtered(seed=1)
    before = {name: tensor.clone() for name, tensor in other.named_parameters()}
    report = load_module(tmp_path / "a.ckpt", module=other)[1]
    assert {key.removeprefix("model.") for key in report.missing} == left_out(other, fqns(other))
    for name, tensor in other.named_parameters():
        assert torch.equal(tensor, before[name] if name.startswith(Filtered.without) else net.get_parameter(name))
    with pytest.raises(CheckpointMismatchError, match="missing in the checkpoint"):
        load_module(tmp_path / "a.ckpt", module=Net())
