"""Kinds of modules under sharding: each trains as it does under DDP, bit by bit, and as in a loop on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_shard import ShardDDPStrategy, ShardFSDPStrategy
from lightning_shard.errors import ConfigurationError, PrecisionError
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import whole_parameters
from tests.strategies.regression import BATCH, STEPS, WIDTH, Layer, Regression, check_equal_on_ranks, compare, data, fit


class Plain(Regression):
    pass


class WithAdapter(Regression):
    """Several parameters in modules that stay whole; in an order of names that is not that of addresses."""

    def build(self) -> None:
        super().build()
        self.adapter = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.net(x))


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


class LoadedInBf16(WithAdapter):
    def build(self) -> None:
        super().build()
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()


class Scalars(Regression):
    """0-d parameters in a unit, in a module of the root and on the LightningModule."""

    def build(self) -> None:
        super().build()
        self.net[0].register_parameter("gate", nn.Parameter(torch.tensor(0.5)))
        self.net[0].forward = lambda x, layer=self.net[0]: Layer.forward(layer, x) * layer.gate
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature.exp()


class Clamped(Scalars):
    """As CLIP's, with a clamp of the data in the step."""

    def forward(self, x: Tensor) -> Tensor:
        self.temperature.data.clamp_(max=1.2)
        return super().forward(x)


class Frozen(Regression):
    """Frozen parameters in other dtypes, in units and outside."""

    def build(self) -> None:
        super().build()
        self.net[0].a.requires_grad_(False)
        self.net[0].a.weight.data = self.net[0].a.weight.data.bfloat16()
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift


class OnlyItsOwn(Regression):
    """No child has parameters."""

    def build(self) -> None:
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.metric = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.metric.update(x)
        # What a LightningModule does in its own forward is its own affair.
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class SharedBlock(Regression):
    """One block three times in a list, and once more by another name from the root."""

    def build(self) -> None:
        block = Layer()
        self.blocks = nn.ModuleList([block, block, block])
        self.last = block
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class SharedWithRoot(Regression):
    """A layer inside a unit that the root also calls."""

    def build(self) -> None:
        super().build()
        self.borrowed = self.net[0].a

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.borrowed(x)[:, :WIDTH]


class TiedUnits(Regression):
    """Ties between units side by side, and between an inner one and what is around it."""

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


class Mixture(Regression):
    """Layers that torch treats in special ways: running statistics, attention, recurrence, convolutions."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.image = nn.Conv2d(1, 2, (1, 3), padding=(0, 1))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(self.norm(x)[:, None, None])[:, :, 0]
        for layer in self.layers:
            x = layer(x)
        x, _ = self.recurrent(x.transpose(0, 1))
        return self.head(x[-1])


class SeveralForwards(Regression):
    """Calls itself and parts of itself more than once in a step."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        first, second = self(x), self(x.flip(0)).flip(0)
        with torch.no_grad():
            target = self.net[0](x).float()
        return functional.mse_loss(first.float(), y) + (first - second).float().square().mean() + target.mean() * 0


class KeywordsOnly(Regression):
    """Outputs and inputs in containers."""

    def build(self) -> None:
        super().build()
        self.wrapped = InDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(batch={"x": self.net(x), "ids": torch.arange(len(x))})["out"]


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, batch: dict[str, Tensor]) -> dict[str, Any]:
        assert batch["ids"].dtype == torch.int64
        return {"out": self.layer(batch["x"]), "extra": [batch["ids"]]}


def one_process(kind: Callable[[], Regression], world: int) -> Regression:
    """The plain loop over the batches that all ranks had together."""
    module = kind().float()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(data(BATCH * world)):
        if step == STEPS:
            break
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()
    return module


CASES: list[tuple[type[Regression], list[dict[str, Any]]]] = [
    (Plain, [{}]),
    (WithAdapter, [{"ignored_modules": ["Adapter"]}, {"ignored_modules": ["Linear", "Adapter"]}]),
    (LoadedInBf16, [{"ignored_modules": ["Adapter"]}]),
    (Scalars, [{}, {"units": 1}]),
    (Clamped, [{}]),
    (Frozen, [{}, {"units": 1}, {"ignored_modules": ["Linear"]}]),
    (OnlyItsOwn, [{}, {"cpu_offload": True}]),
    (SharedBlock, [{}, {"units": ["Linear"]}, {"units": ["Layer", "Linear"]}]),
    (SharedWithRoot, [{}, {"units": ["Layer", "Linear"]}]),
    (TiedUnits, [{}, {"units": 1}, {"units": ["Layer", "Linear"]}, {"forward_prefetch": 1, "backward_prefetch": 1}]),
    (Mixture, [{}, {"units": 1}, {"activation_checkpointing": "units"}]),
    (SeveralForwards, [{}, {"units": ["Layer"], "activation_checkpointing": "units"}]),
    (KeywordsOnly, [{"units": ["InDict", "Layer"]}]),
]
# Sums over a batch of 8 in one kernel, or over 4 twice and then added; AdamW turns a rounding of a gradient near
# zero into a part of a step of 1e-2.
TOLERANCE = {"rtol": 0, "atol": 2e-3}
HAS_BATCH_STATISTICS = (WithAdapter, LoadedInBf16, Mixture)


def _check_kind(kind: type[Regression], options: list[dict[str, Any]], precision: str) -> None:
    expected = fit(kind, ShardDDPStrategy(aligned=True), precision)
    check_equal_on_ranks(expected)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, expected.seen)
    assert seen[0] != seen[1]
    built = kind()
    assert not any(
        torch.equal(p, q)
        for p, q in zip(built.parameters(), whole_parameters(expected).values(), strict=True)
        if p.requires_grad
    )
    for case in options:
        found = fit(kind, ShardFSDPStrategy(aligned=True, **case), precision)
        assert found.losses == expected.losses, case
        compare(found, expected, case)
        assert found.trainer.callback_metrics["val_loss"] == expected.trainer.callback_metrics["val_loss"], case
        _check_cut(found, case)
    if precision == "32-true" and kind not in HAS_BATCH_STATISTICS:
        reference = one_process(kind, dist.get_world_size())
        for name, parameter in whole_parameters(reference).items():
            torch.testing.assert_close(whole_parameters(expected)[name].float(), parameter, **TOLERANCE)  # type: ignore[arg-type]


def _check_cut(module: Regression, case: dict[str, Any]) -> None:
    from lightning_shard.tensors.names import class_name

    whole = {p for m in module.modules() if class_name(m) in case.get("ignored_modules", []) for p in m.parameters()}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) == (parameter not in whole and parameter.ndim > 0), name


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("kind", "options"), sampled(CASES, 1, 3, 5, 7), ids=[kind.__name__ for kind, _ in CASES])
def test_trains_as_under_ddp(kind: type[Regression], options: list[dict[str, Any]], precision: str) -> None:
    run_distributed(_check_kind, 2, kind, options, precision)


def _check_dtypes() -> None:
    module = fit(Frozen, ShardFSDPStrategy(), "bf16-mixed")
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert kept == {"net.0.a.weight", "shift"}
    expected = Frozen()
    assert torch.equal(module.net[0].a.weight.full_tensor(), expected.net[0].a.weight)
    assert torch.equal(module.shift.full_tensor(), expected.shift)


def test_frozen_parameters_keep_value_and_dtype() -> None:
    run_distributed(_check_dtypes, 2)


# A module that shards itself.


class ShardsItself(Regression):
    def __init__(self, policy: MixedPrecisionPolicy | None = None, *, root: bool = False) -> None:
        self.mp_policy, self.shards_root = policy or MixedPrecisionPolicy(), root
        super().__init__()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        assert self.device_mesh.mesh_dim_names == ("replicate", "shard")
        if isinstance(self.net[0].a.weight, DTensor):
            return
        settings: dict[str, Any] = {"mesh": self.device_mesh["shard"], "mp_policy": self.mp_policy}
        # Not the second one, which the strategy would choose as well.
        fully_shard(self.net[0].a, **settings)
        fully_shard(self.net[0], **settings)
        if self.shards_root:
            fully_shard(self, **settings)


class HasDTensors(Regression):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        weight = distribute_tensor(self.net[0].a.weight.detach(), self.device_mesh["shard"])
        self.net[0].a.weight = nn.Parameter(weight)


def _check_shards_itself() -> None:
    for strategy in (ShardFSDPStrategy(), ShardDDPStrategy()):
        with pytest.raises(ConfigurationError, match=r"1 come already sharded as DTensors, net\.0\.a\.weight first"):
            fit(HasDTensors, strategy)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for precision, policy in [("32-true", None), ("bf16-mixed", bf16)]:
        expected = fit(Plain, ShardFSDPStrategy(), precision)
        for root in (False, True):
            found = fit(lambda p=policy, r=root: ShardsItself(p, root=r), ShardFSDPStrategy(), precision)  # type: ignore[misc]
            assert found.losses == expected.losses
            compare(found, expected, (precision, root))
            sharded = {name for name, m in found.named_modules() if isinstance(m, FSDPModule)}
            assert sharded == {"", "net.0", "net.0.a"}
            _check_cut(found, {})
        checkpointed = fit(
            lambda p=policy: ShardsItself(p),  # type: ignore[misc]
            ShardFSDPStrategy(activation_checkpointing="units", forward_prefetch=1),
            precision,
        )
        compare(checkpointed, expected, "activation checkpointing")
    with pytest.raises(PrecisionError, match=r"fully_shard to net\.0, net\.0\.a.*compute bf16.*param_dtype=torch.bflo"):
        fit(ShardsItself, ShardFSDPStrategy(), "bf16-mixed")
    with pytest.raises(PrecisionError, match="MixedPrecisionPolicy"):
        fit(lambda: ShardsItself(bf16), ShardFSDPStrategy(), "32-true")
    with pytest.raises(ConfigurationError, match="needs a module with full parameters"):
        fit(ShardsItself, ShardDDPStrategy())


@pytest.mark.matrix
def test_a_module_that_shards_itself_in_configure_model() -> None:
    run_distributed(_check_shards_itself, 2)


class OverLists(WithAdapter):
    """Has kernels over lists of tensors, or not, and notes the groups that a hook sees, with the sizes of steps."""

    def __init__(self, **kernel: bool) -> None:
        super().__init__()
        self.kernel, self.shown, self.stepped = kernel, set[int](), set[tuple[int, ...]]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, **self.kernel)
        optimizer.register_step_pre_hook(self.note)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def note(self, optimizer: torch.optim.Optimizer, *step: Any) -> None:
        self.stepped.add(tuple(len(group["params"]) for group in optimizer.param_groups))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.shown.add(len(optimizer.param_groups))


def _mixed_group() -> list[Any]:
    """Of a fit with each kernel: the groups in hooks, in steps, and left; its values."""
    found = []
    for kernel in ({"foreach": False}, {"foreach": True}):  # fused ones on CPUs step full parameters in any case
        module = fit(partial(OverLists, **kernel), ShardFSDPStrategy(aligned=True, ignored_modules=["Adapter"]))
        lrs = [group["lr"] for group in module.trainer.optimizers[0].param_groups]
        found.append((module.shown, module.stepped, lrs, whole_parameters(module)))
    return found


def test_a_group_of_shards_and_full_parameters() -> None:
    """Optimizers of torch step lists of tensors on GPUs, and fail where some are DTensors and others are not."""
    for (*one, expected), *others in run_distributed(_mixed_group, 2):
        for *shown, values in others:
            assert shown == one
            assert (shown[0], [len(sizes) for sizes in shown[1]]) == ({1}, [2])  # one group, stepped as two
            for name, value in values.items():
                # Kernels over lists take roots and quotients in another order.
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
