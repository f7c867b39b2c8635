"""Kinds of modules under sharding: each trains as it does under DDP, bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard import ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.errors import ConfigurationError, PrecisionError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import whole_parameters
from tests.strategies.regression import WIDTH, Layer, Regression, check_equal_on_ranks, compare, fit


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) * self.gain


class WithAdapter(Regression):
    """Several parameters in modules that stay whole, in an order of names that is not that of addresses."""

    def build(self) -> None:
        super().build()
        self.adapter = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.net(x))


class Frozen(Regression):
    """Frozen parameters in other dtypes, in units and outside, and ones without a dimension."""

    def build(self) -> None:
        super().build()
        self.net[0].a.requires_grad_(False)
        self.net[0].a.weight.data = self.net[0].a.weight.data.bfloat16()
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.net[0].register_parameter("gate", nn.Parameter(torch.tensor(0.5)))
        self.net[0].forward = lambda x, layer=self.net[0]: Layer.forward(layer, x) * layer.gate
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) + self.shift) * self.temperature.exp()


class Shared(Regression):
    """A block three times in a list and once more by another name, and a layer of a unit that the root calls too."""

    def build(self) -> None:
        super().build()
        block = Layer()
        self.blocks = nn.ModuleList([block, block, block])
        self.last, self.borrowed = block, self.net[0].a

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.net(self.last(x)) + self.borrowed(x)[:, :WIDTH]


class TiedUnits(Regression):
    """Ties between units side by side, and between an inner one and the one around it."""

    def build(self) -> None:
        self.model = Tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.blocks[2].a.weight = self.blocks[0].a.weight
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.scale


CASES: list[tuple[type[Regression], list[dict[str, Any]]]] = [
    (Frozen, [{}, {"units": 1}]),
    (Shared, [{"units": ["Layer", "Linear"]}]),
    (WithAdapter, [{"ignored_modules": ["Adapter"]}, {"ignored_modules": ["Linear", "Adapter"]}]),
    (Shared, [{}, {"units": ["Linear"]}]),
    (TiedUnits, [{}, {"units": 1}, {"units": ["Layer", "Linear"]}, {"forward_prefetch": 1, "backward_prefetch": 1}]),
]


def _check_kind(kind: type[Regression], options: list[dict[str, Any]], precision: str) -> None:
    expected = fit(kind, ShardDDPStrategy(aligned=True), precision)
    check_equal_on_ranks(expected)
    for case in options:
        found = fit(kind, ShardFSDPStrategy(aligned=True, **case), precision)
        assert found.losses == expected.losses, case
        compare(found, expected, case)
        assert found.trainer.callback_metrics["val_loss"] == expected.trainer.callback_metrics["val_loss"], case
        _check_cut(found, case)


def _check_cut(module: Regression, case: dict[str, Any]) -> None:
    from lightning_shard.tensors.names import class_name

    whole = {p for m in module.modules() if class_name(m) in case.get("ignored_modules", []) for p in m.parameters()}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) == (parameter not in whole and parameter.ndim > 0), name


@pytest.mark.matrix
@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 0))
@pytest.mark.parametrize(("kind", "options"), sampled(CASES, 0, 1, 2))
def test_trains_as_under_ddp(kind: type[Regression], options: list[dict[str, Any]], precision: str) -> None:
    run_distributed(_check_kind, 2, kind, options, precision)


class ShardsItself(Regression):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        assert self.device_mesh.mesh_dim_names == ("replicate", "shard")
        if isinstance(self.net[0], FSDPModule):
            return
        # Not the second one, which the strategy would choose as well.
        for module in (self.net[0].a, self.net[0]):
            fully_shard(module, mesh=self.device_mesh["shard"], mp_policy=self.policy)


class ShardsItsRoot(ShardsItself):
    def configure_model(self) -> None:
        super().configure_model()
        if not isinstance(self, FSDPModule):
            fully_shard(self, mesh=self.device_mesh["shard"], mp_policy=self.policy)  # type: ignore[index]


class ShardsInFp32(ShardsItself):
    policy = MixedPrecisionPolicy()


class HasDTensors(Regression):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        weight = distribute_tensor(self.net[0].a.weight.detach(), self.device_mesh["shard"])
        self.net[0].a.weight = nn.Parameter(weight)


def _check_shards_itself() -> None:
    expected = fit(Regression, ShardFSDPStrategy(), "bf16-mixed")
    for kind in (ShardsItself, ShardsItsRoot):
        found = fit(kind, ShardFSDPStrategy(), "bf16-mixed")
        assert found.losses == expected.losses
        compare(found, expected, kind)
        assert {n for n, m in found.named_modules() if isinstance(m, FSDPModule)} == {"", "net.0", "net.0.a"}
        _check_cut(found, {})
    with pytest.raises(ConfigurationError, match=r"1 come already sharded as DTensors, net\.0\.a\.weight first"):
        fit(HasDTensors, ShardFSDPStrategy())
    with pytest.raises(PrecisionError, match=r"fully_shard to net\.0, net\.0\.a.*compute bf16.*param_dtype=torch.bflo"):
        fit(ShardsInFp32, ShardFSDPStrategy(), "bf16-mixed")
    with pytest.raises(ConfigurationError, match="needs a module with full parameters"):
        fit(ShardsInFp32, ShardDDPStrategy())


@pytest.mark.matrix
def test_a_module_that_shards_itself_in_configure_model() -> None:
    run_distributed(_check_shards_itself, 2)


class OverLists(WithAdapter):
    """Has kernels over lists of tensors, or not, and notes how many groups there are in hooks and in steps."""

    def __init__(self, foreach: bool) -> None:
        super().__init__()
        self.foreach, self.shown, self.stepped = foreach, set[int](), set[int]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=self.foreach)
        optimizer.register_step_pre_hook(lambda optimizer, *_: self.stepped.add(len(optimizer.param_groups)))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.shown.add(len(optimizer.param_groups))


def _mixed_group() -> list[Any]:
    """Of a fit with each kernel: the groups in hooks and in steps, the rates, and the values."""
    found = []
    for foreach in (False, True):  # fused ones on CPUs step full parameters in any case
        module = fit(partial(OverLists, foreach), ShardFSDPStrategy(aligned=True, ignored_modules=["Adapter"]))
        rates = [group["lr"] for group in module.trainer.optimizers[0].param_groups]
        found.append((module.shown, module.stepped, rates, whole_parameters(module)))
    return found


def test_a_group_of_shards_and_full_parameters() -> None:
    """Optimizers of torch step lists of tensors on GPUs, and fail where some are DTensors and others are not."""
    for (shown, stepped, rates, expected), (*other, values) in run_distributed(_mixed_group, 2):
        assert other == [shown, stepped, rates] == [{1}, {2}, rates]  # one group, stepped as two
        for name, value in values.items():
            # Kernels over lists take roots and quotients in another order.
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
