"""Optimizer state by name: groups and slots of every kind, found in any order, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.foreign.lightning_file import ModuleNames
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.matching import LoadReport
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from tests.checkpoint.calls import live, load_module, save_module
from tests.checkpoint.wrapped import Net, named, trained


def test_groups_and_parameters_are_found_by_name_in_any_order(tmp_path):
    net = Net()
    decay, rest = named(net, "weight"), named(net, "bias", "scale")
    groups = [{"params": decay, "weight_decay": 0.1, "lr": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 0.3}]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    trained(net, [adam])
    save_module(tmp_path / "a.ckpt", module=net, optimizers=[adam])

    other = Net(seed=1)
    groups = [{"params": named(other, "bias", "scale")[::-1], "lr": 9.0}, {"params": named(other, "weight")[::-1]}]
    adam_of_other = torch.optim.AdamW(groups)
    load_module(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other])
    assert [g["lr"] for g in adam_of_other.param_groups] == [0.3, 0.2]
    assert [g["weight_decay"] for g in adam_of_other.param_groups] == [0.0, 0.1]
    assert [g["betas"] for g in adam_of_other.param_groups] == [(0.8, 0.9)] * 2
    expected = live(net, [adam])
    found = live(other, [adam_of_other])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    trained(net, [adam])
    trained(other, [adam_of_other])
    for key, tensor in live(net, []).items():
        assert torch.equal(live(other, [])[key], tensor), key


def test_other_groups_than_were_saved_are_refused(tmp_path):
    net = Net()
    one = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    two = torch.optim.SGD([{"params": named(net, "weight")}, {"params": named(net, "bias", "scale")}], lr=0.1)
    for saved, own, group in ((one, two, 1), (two, one, 0)):
        save_module(tmp_path / "a.ckpt", module=net, optimizers=[saved])
        with pytest.raises(CheckpointMismatchError, match=f"group {group} .* grouped in another way"):
            load_module(tmp_path / "a.ckpt", module=net, optimizers=[own])


def test_several_optimizers_and_every_kind_of_slot(tmp_path):
    """AdamW with amsgrad, ASGD, Rprop (its state has numbers), SGD without state, in one checkpoint."""
    net = Net()
    capturable_lr = torch.tensor(0.25)
    make = [
        lambda n: torch.optim.AdamW(named(n, "embed"), lr=capturable_lr.clone(), amsgrad=True),
        lambda n: torch.optim.ASGD(named(n, "scale")),
        lambda n: torch.optim.Rprop(named(n, "module.0")),
        lambda n: torch.optim.SGD(named(n, "module.1"), lr=0.1),
    ]
    optimizers = [new(net) for new in make]
    trained(net, optimizers)
    optimizers[2].state[net.module[0].bias]["note"] = {"text": "a", "none": None}
    optimizers[3].state["everything"] = "left out"
    save_module(tmp_path / "a.ckpt", module=net, optimizers=optimizers)
    capturable_lr.fill_(0.5)
    other = Net(seed=1)
    loaded = [new(other) for new in make]
    learning_rate = loaded[0].param_groups[0]["lr"]
    load_module(tmp_path / "a.ckpt", module=other, optimizers=loaded)
    assert loaded[0].param_groups[0]["lr"] is learning_rate
    assert learning_rate == 0.25
    assert loaded[2].state[other.module[0].bias]["note"] == {"text": "a", "none": None}
    expected = live(net, optimizers)
    assert {"max_exp_avg_sq", "eta", "ax", "prev", "step_size"} <= {key.rpartition(".")[2] for key in expected}
    found = live(other, loaded)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
        assert found[key].dtype == tensor.dtype, key
        assert found[key].stride() == tensor.stride(), key
    trained(net, optimizers)
    trained(other, loaded)
    for key, tensor in live(net, []).items():
        assert torch.equal(live(other, [])[key], tensor), key


def test_state_follows_its_parameter_to_another_dtype(tmp_path):
    """Low memory on one side, fp32 masters on the other; state of a dtype of its own keeps it."""
    net = nn.Linear(3, 2).to(torch.bfloat16)
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    adam.state[net.bias]["own"] = torch.ones(2, dtype=torch.float64)
    save_module(tmp_path / "a.ckpt", module=net, optimizers=[adam])
    other = nn.Linear(3, 2)
    adam_of_other = torch.optim.AdamW(other.parameters())
    load_module(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other])
    state = adam_of_other.state[other.bias]
    assert (state["exp_avg"].dtype, state["step"].dtype, state["own"].dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )
    assert torch.equal(state["exp_avg"], adam.state[net.bias]["exp_avg"].float())
    assert torch.equal(other.weight, net.weight.float())


def test_an_optimizer_over_foreign_parameters_is_an_error(tmp_path):
    net = nn.Linear(2, 3)
    adam = torch.optim.AdamW([*net.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(CheckpointError, match=r"parameter of shape \(7,\) that the module does not have"):
        save_module(tmp_path / "a", module=net, optimizers=[adam])


def test_optimizers_that_do_not_fit(tmp_path):
    net = Net()
    adam = torch.optim.AdamW(named(net, "weight"))
    trained(net, [adam])
    path = tmp_path / "a.ckpt"
    save_module(path, module=net, optimizers=[adam])
    before = {key: tensor.clone() for key, tensor in live(net, []).items()}
    trained(net, [adam])
    other = torch.optim.AdamW(named(net, "bias", "embed", "module"))
    with pytest.raises(CheckpointMismatchError) as caught:
        load_module(path, module=net, optimizers=[other])
    assert "missing in the checkpoint (2): optimizer.0.module.0.bias, optimizer.0.module.1.bias" in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match="1 optimizers were saved, here are 2"):
        load_module(path, module=net, optimizers=[adam, other])
    assert not torch.equal(net.embed.weight, before["model.embed.weight"])
    assert not other.state
    load_module(path, module=net, optimizers=[other], strict=False)
    assert torch.equal(net.embed.weight, before["model.embed.weight"])
    assert net.embed.weight in other.state


class Renamed(torch.optim.AdamW):
    """A user's own, which steps as AdamW does."""


def test_another_kind_of_optimizer_is_refused(tmp_path):
    net = nn.Linear(2, 2)
    kinds = {
        "AdamW": torch.optim.AdamW(net.parameters()),
        "SGD": torch.optim.SGD(net.parameters(), lr=0.1),
        "Renamed": Renamed(net.parameters()),
    }
    for name, optimizer in kinds.items():
        save_module(tmp_path / name, module=net, optimizers=[optimizer])
    for saved in kinds:
        for name, optimizer in kinds.items():
            before = {**optimizer.param_groups[0]}
            if name == saved or (saved, name) == ("AdamW", "Renamed"):
                load_module(tmp_path / saved, module=net, optimizers=[optimizer], strict=False)
                continue
            with pytest.raises(CheckpointMismatchError, match=f"optimizer 0 was {saved} and is {name} here: build the"):
                load_module(tmp_path / saved, module=net, optimizers=[optimizer], strict=False)
            assert optimizer.param_groups[0] == before


def test_another_kind_of_optimizer_in_a_stock_file_is_refused_by_its_hyperparameters(tmp_path):
    net = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.AdamW(net.parameters())
    stock = {"state_dict": net.state_dict(), "optimizer_states": [sgd.state_dict()]}
    torch.save(stock, tmp_path / "stock.ckpt")
    write_portable(tmp_path / "a.ckpt", open_any(tmp_path / "stock.ckpt", lambda: ModuleNames.of(net, [sgd])))
    with pytest.raises(CheckpointMismatchError, match="was one with momentum and is AdamW here"):
        load_module(tmp_path / "a.ckpt", module=net, optimizers=[adam])
    load_module(tmp_path / "a.ckpt", module=net, optimizers=[sgd])


def test_hyperparameters_that_the_checkpoint_replaces_are_said(tmp_path):
    net = Net()
    adam = torch.optim.AdamW([{"params": net.parameters(), "weights": torch.ones(2)}], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    trained(net, [adam])
    schedule.step()
    save_module(tmp_path / "a.ckpt", module=net, optimizers=[adam])
    again = torch.optim.AdamW(net.parameters(), lr=0.5)
    torch.optim.lr_scheduler.ExponentialLR(again, 0.9)
    again.param_groups[0]["betas"] = [0.9, 0.999]  # as YAML has them
    again.param_groups[0]["weights"] = torch.ones(2)
    assert load_module(tmp_path / "a.ckpt", module=net, optimizers=[again])[1] == LoadReport()
    other = torch.optim.AdamW([{"params": net.parameters(), "weights": torch.zeros(2)}], lr=0.1, weight_decay=0.3)
    torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    assert load_module(tmp_path / "a.ckpt", module=net, optimizers=[other])[1].overridden == (
        "lr of group 0 of optimizer 0 is 0.45, not 0.1",
        "weight_decay of group 0 of optimizer 0 is 0.01, not 0.3",
        "weights of group 0 of optimizer 0 is tensor([1., 1.]), not tensor([0., 0.])",
    )
    assert other.param_groups[0]["weights"].tolist() == [1.0, 1.0]
