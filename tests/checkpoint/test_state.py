"""Names of tensors under every wrapper, and optimizer state found by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric

from lightning_shard.checkpoint.fit import LoadReport
from lightning_shard.checkpoint.load import load_tensors, load_training_state, read_manifest
from lightning_shard.checkpoint.optimizer import optimizer_groups, optimizer_tensors
from lightning_shard.checkpoint.save import CheckpointInfo, save, save_training_state
from lightning_shard.checkpoint.state import extra_state, load_extra_state, model_tensors
from lightning_shard.checkpoint.trainer_state import read_trainer_state
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.names import fqns
from tests.harness import run_distributed

INFO = CheckpointInfo(engine="test", policy="fp32")


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """Blocks, one of them called like a wrapper's attribute; a tied weight, a shared module, a normalisation."""

    def __init__(self, *, tie: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(4))
        self.embed = nn.Embedding(6, 4)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.module[0]
        self.head = nn.Linear(4, 6, bias=False)
        self.extra = Extra()
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.extra.seen += 1
        return self.head(self.again(self.module(self.embed(tokens))) * self.scale)


PARAMETERS = ["scale", "embed.weight", "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
BUFFERS = ["module.1.running_mean", "module.1.running_var", "module.1.num_batches_tracked"]
ALIASES = {"again.weight": "module.0.weight", "again.bias": "module.0.bias", "head.weight": "embed.weight"}


def wrapped(how: str) -> nn.Module:
    net = Net()
    if "inner" in how:
        net.module[0] = torch.compile(net.module[0])
        net.module[1] = checkpoint_wrapper(net.module[1])
        net.again = net.module[0]
    if "fsdp" in how:
        # One unit: its parameters have names in two parts of the tree.
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if "compile" in how:
        return torch.compile(net)
    return DistributedDataParallel(net) if "ddp" in how else net


def names_under(how: str) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    net = wrapped(how)
    names = fqns(net)
    load_extra_state(net, {"extra._extra_state": {"seen": 7}})
    return list(names.tensors), dict(names.aliases), extra_state(net)


@pytest.mark.parametrize(
    "how", ["plain", "compile", "inner", "ddp", "fsdp", "fsdp inner", "fsdp inner compile", "ddp inner"]
)
def test_names_are_those_of_the_unwrapped_module(how):
    tensors, aliases, extra = run_distributed(names_under, 1, how)[0]
    assert tensors == PARAMETERS + BUFFERS
    assert aliases == ALIASES
    assert extra == {"extra._extra_state": {"seen": 7}}


def test_buffers_that_are_not_persistent_and_missing_parameters_have_no_name():
    net = nn.Linear(2, 2, bias=False)
    net.register_buffer("scratch", torch.ones(1), persistent=False)
    net.register_buffer("nothing", None)
    assert list(fqns(net).tensors) == ["weight"]
    assert model_tensors(net)["model.weight"] is net.weight


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_states_of_metrics_that_ask_for_it_are_kept():
    net = nn.Module()
    net.mean = MeanMetric()
    net.mean.persistent(True)
    net.mean.update(torch.tensor([1.0, 2.0]))
    other = nn.Module()
    other.mean = MeanMetric()
    other.mean.persistent(True)
    load_extra_state(other, extra_state(net))
    assert other.mean.compute() == 1.5
    with pytest.raises(CheckpointMismatchError, match=r"no module takes: mean\.\w+, mean\.\w+; load with strict=False"):
        load_extra_state(nn.Linear(1, 1), extra_state(net))
    load_extra_state(nn.Linear(1, 1), extra_state(net), strict=False)


def trained(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        net(torch.randint(0, 6, (5,))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def named(net: nn.Module, *fragments: str) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if any(f in name for f in fragments)]


def test_groups_and_parameters_are_found_by_name_in_any_order(tmp_path):
    net = Net()
    decay, rest = named(net, "weight"), named(net, "bias", "scale")
    groups = [{"params": decay, "weight_decay": 0.1, "lr": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 0.3}]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    trained(net, [adam])
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={}, info=INFO)

    other = Net(seed=1)
    groups = [{"params": named(other, "bias", "scale")[::-1], "lr": 9.0}, {"params": named(other, "weight")[::-1]}]
    adam_of_other = torch.optim.AdamW(groups)
    load_training_state(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other])
    assert [g["lr"] for g in adam_of_other.param_groups] == [0.3, 0.2]
    assert [g["weight_decay"] for g in adam_of_other.param_groups] == [0.0, 0.1]
    assert [g["betas"] for g in adam_of_other.param_groups] == [(0.8, 0.9)] * 2
    expected = optimizer_tensors([adam], fqns(net))
    found = optimizer_tensors([adam_of_other], fqns(other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    trained(net, [adam])
    trained(other, [adam_of_other])
    for key, tensor in model_tensors(net).items():
        assert torch.equal(model_tensors(other)[key], tensor), key


def test_one_group_can_be_split_where_hyperparameters_agree(tmp_path):
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    trained(net, [sgd])
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[sgd], trainer_state={}, info=INFO)
    two = torch.optim.SGD([{"params": named(net, "weight")}, {"params": named(net, "bias", "scale")}], lr=0.1)
    load_training_state(tmp_path / "a.ckpt", module=net, optimizers=[two])
    assert [g["lr"] for g in two.param_groups] == [0.5, 0.5]

    two.param_groups[0]["lr"] = 0.7
    save_training_state(tmp_path / "b.ckpt", module=net, optimizers=[two], trainer_state={}, info=INFO)
    with pytest.raises(CheckpointMismatchError, match=r"group 0 of optimizer 0 joins parameters .* with different lr"):
        load_training_state(tmp_path / "b.ckpt", module=net, optimizers=[sgd])


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
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=optimizers, trainer_state={}, info=INFO)
    capturable_lr.fill_(0.5)
    other = Net(seed=1)
    loaded = [new(other) for new in make]
    learning_rate = loaded[0].param_groups[0]["lr"]
    load_training_state(tmp_path / "a.ckpt", module=other, optimizers=loaded)
    assert loaded[0].param_groups[0]["lr"] is learning_rate
    assert learning_rate == 0.25
    assert loaded[2].state[other.module[0].bias]["note"] == {"text": "a", "none": None}
    expected = optimizer_tensors(optimizers, fqns(net))
    assert {"max_exp_avg_sq", "eta", "ax", "prev", "step_size"} <= {key.rpartition(".")[2] for key in expected}
    found = optimizer_tensors(loaded, fqns(other))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
        assert found[key].dtype == tensor.dtype, key
        assert found[key].stride() == tensor.stride(), key
    trained(net, optimizers)
    trained(other, loaded)
    for key, tensor in model_tensors(net).items():
        assert torch.equal(model_tensors(other)[key], tensor), key


def test_state_follows_its_parameter_to_another_dtype(tmp_path):
    """Low memory on one side, fp32 masters on the other; state of a dtype of its own keeps it."""
    net = nn.Linear(3, 2).to(torch.bfloat16)
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    adam.state[net.bias]["own"] = torch.ones(2, dtype=torch.float64)
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={}, info=INFO)
    other = nn.Linear(3, 2)
    adam_of_other = torch.optim.AdamW(other.parameters())
    load_training_state(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other])
    state = adam_of_other.state[other.bias]
    assert (state["exp_avg"].dtype, state["step"].dtype, state["own"].dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )
    assert torch.equal(state["exp_avg"], adam.state[net.bias]["exp_avg"].float())
    assert torch.equal(other.weight, net.weight.float())


def test_an_optimizer_that_has_not_stepped(tmp_path):
    net = Net()
    adam = torch.optim.AdamW(net.parameters(), lr=0.5)
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={}, info=INFO)
    trained(net, [adam])
    load_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam])
    assert not adam.state


def test_an_optimizer_over_foreign_parameters_is_an_error(tmp_path):
    net = nn.Linear(2, 3)
    adam = torch.optim.AdamW([*net.parameters(), nn.Parameter(torch.ones(7))])
    for use in (
        lambda: optimizer_groups([adam], fqns(net)),
        lambda: save_training_state(tmp_path / "a", module=net, optimizers=[adam], trainer_state={}, info=INFO),
    ):
        with pytest.raises(CheckpointError, match=r"parameter of shape \(7,\) \(group 0, position 2\) that the module"):
            use()


@pytest.mark.parametrize(("saved_tied", "live_tied"), [(True, False), (False, True)])
def test_tying_may_differ(tmp_path, saved_tied, live_tied):
    net = Net(tie=saved_tied)
    adam = torch.optim.AdamW(net.parameters())
    trained(net, [adam])
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={}, info=INFO)
    other = Net(tie=live_tied, seed=1)
    adam_of_other = torch.optim.AdamW(other.parameters())
    strict = saved_tied
    report = load_training_state(tmp_path / "a.ckpt", module=other, optimizers=[adam_of_other], strict=strict)[1]
    assert torch.equal(other.embed.weight, net.embed.weight)
    assert torch.equal(adam_of_other.state[other.embed.weight]["exp_avg"], adam.state[net.embed.weight]["exp_avg"])
    if saved_tied:
        assert torch.equal(other.head.weight, net.head.weight)
        assert other.head.weight is not other.embed.weight
        assert torch.equal(adam_of_other.state[other.head.weight]["exp_avg"], adam.state[net.head.weight]["exp_avg"])
        assert report == LoadReport()
    else:
        assert report.unexpected == ("optimizer.0.head.weight",)


def test_a_tied_tensor_is_found_under_the_name_that_was_saved(tmp_path):
    """The live model registers the two names the other way round, or the saved one had only the second."""
    save(tmp_path / "a.ckpt", tensors={"model.b": torch.ones(2)}, trainer_state={}, info=INFO)
    net = nn.Module()
    net.a = nn.Parameter(torch.zeros(2))
    net.b = net.a
    load_training_state(tmp_path / "a.ckpt", module=net)
    assert net.a.tolist() == [1.0, 1.0]


def test_missing_unexpected_and_reshaped_keys_are_listed_together(tmp_path):
    tensors = {f"model.{name}": torch.ones(2, 3) for name in ("same", "gone", "turned")}
    save(tmp_path / "a.ckpt", tensors=tensors, trainer_state={}, info=INFO)
    asked = {"model.same": torch.zeros(2, 3), "model.new": torch.zeros(1), "model.turned": torch.zeros(3, 2)}
    with pytest.raises(CheckpointMismatchError) as caught:
        load_tensors(tmp_path / "a.ckpt", asked)
    assert str(caught.value).splitlines()[1:] == [
        "  missing in the checkpoint (1): model.new",
        "  unexpected in the checkpoint (1): model.gone",
        "  of another shape (1): model.turned (2, 3) there, (3, 2) here",
    ]
    assert asked["model.same"].eq(0).all()
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_tensors(tmp_path / "a.ckpt", asked, strict=False)
    del asked["model.turned"]
    with pytest.raises(CheckpointMismatchError, match="strict=False loads what matches"):
        load_tensors(tmp_path / "a.ckpt", asked)
    report = load_tensors(tmp_path / "a.ckpt", asked, strict=False)
    assert report == LoadReport(missing=("model.new",), unexpected=("model.gone", "model.turned"))
    assert asked["model.same"].eq(1).all()


def test_a_load_that_matches_nothing_is_an_error(tmp_path):
    save(tmp_path / "a.ckpt", tensors={"model.a": torch.ones(2)}, trainer_state={}, info=INFO)
    with pytest.raises(
        CheckpointMismatchError, match=r"nothing in .* It asks for model\.b; the checkpoint has model\.a"
    ):
        load_tensors(tmp_path / "a.ckpt", {"model.b": torch.ones(2)}, strict=False)


def test_optimizers_that_do_not_fit(tmp_path):
    net = Net()
    adam = torch.optim.AdamW(named(net, "weight"))
    trained(net, [adam])
    path = tmp_path / "a.ckpt"
    save_training_state(path, module=net, optimizers=[adam], trainer_state={}, info=INFO)
    before = {key: tensor.clone() for key, tensor in model_tensors(net).items()}
    trained(net, [adam])
    other = torch.optim.AdamW(named(net, "bias", "embed", "module"))
    with pytest.raises(CheckpointMismatchError) as caught:
        load_training_state(path, module=net, optimizers=[other])
    assert "missing in the checkpoint (2): optimizer.0.module.0.bias, optimizer.0.module.1.bias" in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match="1 optimizers were saved, here are 2"):
        load_training_state(path, module=net, optimizers=[adam, other])
    assert not torch.equal(net.embed.weight, before["model.embed.weight"])
    assert not other.state
    load_training_state(path, module=net, optimizers=[other], strict=False)
    assert torch.equal(net.embed.weight, before["model.embed.weight"])
    assert net.embed.weight in other.state


def test_weights_only(tmp_path):
    net = Net()
    save_training_state(tmp_path / "w.ckpt", module=net, optimizers=(), trainer_state={"epoch": 1}, info=INFO)
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(CheckpointMismatchError, match="no optimizer state: it was saved with weights only"):
        load_training_state(tmp_path / "w.ckpt", module=net, optimizers=[adam])
    trained(net, [adam])
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={"epoch": 1}, info=INFO)
    other = Net(seed=1)
    state, report = load_training_state(tmp_path / "a.ckpt", module=other)
    assert torch.equal(other.scale, net.scale)
    assert other.extra.seen == net.extra.seen == 2
    assert (state["epoch"], report) == (1, LoadReport())


def test_what_is_in_trainer_state_and_manifest(tmp_path):
    net = nn.Linear(2, 1)
    adam = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    save_training_state(tmp_path / "a.ckpt", module=net, optimizers=[adam], trainer_state={"epoch": 1}, info=INFO)
    state = read_trainer_state(tmp_path / "a.ckpt")
    assert state["optimizer_states"][0]["class"] == "AdamW"
    assert state["optimizer_states"][0]["groups"][0]["params"] == ["weight", "bias"]
    assert state["optimizer_states"][0]["groups"][0]["lr"] == 0.5
    slots = [f"optimizer.0.{name}.{slot}" for name in ("bias", "weight") for slot in ("exp_avg", "exp_avg_sq", "step")]
    assert list(read_manifest(tmp_path / "a.ckpt").tensors) == ["model.bias", "model.weight", *slots]


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.ones(2, 2).to_sparse()])
def test_tensors_that_cannot_be_saved(tmp_path, tensor):
    with pytest.raises(CheckpointError, match=r"model\.w is .*; only dense tensors with values can be saved"):
        save(tmp_path / "a.ckpt", tensors={"model.w": tensor}, trainer_state={}, info=INFO)


def test_loading_into_the_meta_device_is_refused(tmp_path):
    save(tmp_path / "a.ckpt", tensors={"model.w": torch.ones(2)}, trainer_state={}, info=INFO)
    with pytest.raises(CheckpointError, match=r"model\.w is on the meta device: materialise"):
        load_tensors(tmp_path / "a.ckpt", {"model.w": torch.empty(2, device="meta")})


def sharded(slot: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    if slot is not None:
        sgd.state[net.weight]["slot"] = slot
    return net, sgd


def save_slot(path: str, slot: Any) -> str:
    net, sgd = sharded(slot)
    try:
        save_training_state(path, module=net, optimizers=[sgd], trainer_state={}, info=INFO)
    except CheckpointError as error:
        return str(error)
    return "saved"


def load_slot(path: str) -> str:
    net, sgd = sharded(None)
    try:
        load_training_state(path, module=net, optimizers=[sgd])
    except CheckpointMismatchError as error:
        return str(error)
    assert isinstance(net.weight, DTensor)
    return "loaded"


def test_slots_that_cannot_be_cut(tmp_path):
    path = str(tmp_path / "a.ckpt")
    said = r"optimizer.0.weight.slot has shape (4,), its sharded parameter (4, 4)"
    assert all(said in result for result in run_distributed(save_slot, 2, path, torch.ones(4)))
    listed = run_distributed(save_slot, 2, path, [torch.ones(4)])
    assert all("optimizer.0.weight.slot is a list of tensors" in result for result in listed)
    assert run_distributed(save_slot, 2, path, torch.ones(())) == ["saved"] * 2
    # Of a replicated parameter any slot can be saved; it is refused where it would have to be cut.
    net = nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    sgd.state[net.weight]["slot"] = torch.arange(4.0)
    save_training_state(path, module=net, optimizers=[sgd], trainer_state={}, info=INFO)
    del sgd.state[net.weight]
    load_training_state(path, module=net, optimizers=[sgd])
    assert sgd.state[net.weight]["slot"].tolist() == [0, 1, 2, 3]
    assert all(said in result for result in run_distributed(load_slot, 2, path))
