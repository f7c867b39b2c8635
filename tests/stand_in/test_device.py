"""What the stand-in for a GPU finds; these tests run on it alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import OptimizerOffload, ShardDDPStrategy, ShardDeepSpeedStrategy, ShardFSDPStrategy, ZeroBuckets
from lightning_shard._lightning.processes import ChildrenLauncher
from lightning_shard.devices import fork_rng
from lightning_shard.engines.optimizer_probe import Needs, probe
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.engines.zero import flat_layout
from lightning_shard.planning.model_facts import Training, facts_of
from lightning_shard.planning.predict import start_points
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import autocasting, policy_from
from lightning_shard.resume.rng import rng_state, same
from tests import stand_in
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.optimizers import Noisy
from tests.strategies.engines import ENGINES, NORM, differences
from tests.strategies.zero import fit

pytestmark = pytest.mark.skipif(not stand_in.chosen(), reason="set TESTS_DEVICE=stand_in")


def _memory() -> None:
    on_device, pinned = torch.arange(8.0, device=stand_in.NAME), torch.empty(8, pin_memory=True)
    assert torch.empty(8, device=stand_in.NAME).isnan().all()
    pinned.copy_(on_device, non_blocking=True)
    assert pinned.isnan().all()
    back = torch.empty(8, device=stand_in.NAME)
    back.copy_(pinned, non_blocking=True)  # in the order of the stream
    event: Any = torch.Event(stand_in.NAME)
    event.record()
    event.synchronize()
    assert pinned.tolist() == on_device.tolist() == back.tolist()
    for mixed in (torch.add, lambda a, b: torch.stack([a.sum(), b.sum()])):
        with pytest.raises(RuntimeError, match=r"same device|two devices"):
            mixed(on_device, torch.ones(8))


class Sorted(TinyLM):
    """What its batches come in can't be built of pairs, and their lengths lie on the host, for packed sequences."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return defaultdict(list, data=moved, lengths=torch.full((4,), 8))

    def loss(self, batch: Any) -> Tensor:
        found.add((self.trainer.training, type(batch), batch["lengths"].device.type))
        return super().loss(batch["data"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


found: set[tuple[bool, type, str]] = set()


def _steps_get(name: str) -> set[tuple[bool, type, str]]:
    found.clear()
    trainer = quiet_trainer(strategy=ENGINES[name](), max_steps=2, limit_val_batches=1)
    trainer.fit(Sorted(), loader(), loader())
    return found


@pytest.mark.parametrize("name", ["ddp_plain", "ddp", "full", "zero_2", "zero_3"])
def test_steps_get_what_batches_were_made_on_the_way_to_the_device(name: str) -> None:
    (seen,) = run_distributed(_steps_get, 1, name)
    assert seen == {(trains, defaultdict, "cpu") for trains in (True, False)}


def _needs() -> tuple[Needs, bool]:
    before = rng_state()
    parameters = [nn.Parameter(torch.zeros(4, 4, device=stand_in.NAME))]
    needs = probe(Noisy(parameters), dtype=torch.float32, aligned=True, alone=True)
    return needs, same(before, rng_state())


def test_an_optimizer_draws_from_the_generator_of_its_device() -> None:
    assert run_distributed(_needs, 1) == [(Needs(full=True, draws=True), True)]


def _autocast() -> list[bool]:
    net, seen = nn.Sequential(nn.Linear(2, 2)).to(stand_in.NAME, torch.bfloat16), list[bool]()
    install_casts(nn.ModuleDict({"net": net}), torch.bfloat16, output=torch.float32)
    net[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled(stand_in.NAME)))
    with autocasting(policy_from("bf16-mixed", aligned=False), stand_in.NAME, cache=False):
        net(torch.ones(1, 2, device=stand_in.NAME))
        seen.append(torch.is_autocast_enabled(stand_in.NAME))
    return seen


def test_modules_switch_autocast_of_their_device_off() -> None:
    assert run_distributed(_autocast, 1) == [[False, True]]


def _drawn_apart() -> bool:
    torch.rand(1, device=stand_in.NAME)  # the device is in use from then on
    before = rng_state()
    with fork_rng():
        torch.rand(3, device=stand_in.NAME)
        drawn = not same(before, rng_state())
    return drawn and same(before, rng_state())


def test_what_is_drawn_apart_leaves_the_generator_of_the_device() -> None:
    assert run_distributed(_drawn_apart, 1) == [True]


def _shared_on_the_host() -> list[float]:
    module = nn.BatchNorm1d(2)  # as one that a user keeps there
    module.running_mean = torch.full((2,), float(dist.get_rank()))
    SharedBuffers(module).share()
    values: list[float] = module.running_mean.tolist()
    return values


def test_buffers_on_the_host_are_shared_over_the_devices_group() -> None:
    assert run_distributed(_shared_on_the_host, 2) == [[0.0, 0.0]] * 2


def _freed_early(recorded: bool) -> list[float]:
    """What another stream copies of memory that is freed meanwhile."""
    freed, pinned = torch.ones(4, device=stand_in.NAME), torch.empty(4, pin_memory=True)
    other = stand_in.Stream()
    with other:
        pinned.copy_(freed, non_blocking=True)
    if recorded:
        freed.record_stream(other)
    del freed
    other.synchronize()
    values: list[float] = pinned.nan_to_num(-1).tolist()
    return values


def test_memory_and_copies() -> None:
    run_distributed(_memory, 1)
    assert run_distributed(_freed_early, 1, True) == [[1.0] * 4]
    assert run_distributed(_freed_early, 1, False) == [[-1.0] * 4]


def _without_waits(*arguments: Any) -> dict[str, Tensor]:
    """A fit that reads offloaded gradients without waiting for them."""
    wait = flat_layout.wait_for_offloaded_gradients
    flat_layout.wait_for_offloaded_gradients = lambda zero: None  # type: ignore[assignment]
    try:
        parameters: dict[str, Tensor] = fit(*arguments)["parameters"]
    finally:
        flat_layout.wait_for_offloaded_gradients = wait
    return parameters


def test_a_missing_wait_is_seen() -> None:
    arguments = ("zero_2_offload", TinyLM, "bf16-mixed", {}, NORM)
    waited = run_distributed(fit, 2, *arguments)[0]["parameters"]
    assert differences(run_distributed(fit, 2, "zero_2", *arguments[1:])[0]["parameters"], waited) == {}
    assert differences(run_distributed(_without_waits, 2, *arguments)[0], waited) != {}


class Deep(TinyLM):
    """Layers of one size; ``dtype``: that in which they are loaded."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def _start(stage: int, offload: bool) -> tuple[int, int]:
    """The most bytes on the device before the first step, and what the plan says."""
    found: list[int] = []

    class Look(Callback):
        def on_train_start(self, *_: Any) -> None:
            found.append(torch.accelerator.max_memory_allocated())

    host = OptimizerOffload(device="cpu") if offload else None
    strategy = ShardDeepSpeedStrategy(stage=stage, offload_optimizer=host, buckets=ZeroBuckets(reduce=10**5))
    trainer = quiet_trainer(strategy=strategy, max_steps=1, precision="bf16-mixed", callbacks=[Look()])
    module, before = Deep(), torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    trainer.fit(module, DataLoader(torch.randn(8, 256), 2))
    training = Training(model=facts_of(module, strategy.engine), policy=strategy.policy)
    (start,) = start_points(training, strategy.engine.memory_model(module, strategy.planned_run()))
    return found[0] - before, start.account.device.total


@pytest.mark.parametrize(("stage", "offload", "ranks"), [(2, False, 4), (1, True, 2), (2, True, 2)])
def test_a_fit_under_zero_begins_with_what_the_plan_says(stage: int, offload: bool, ranks: int) -> None:
    for measured, planned in run_distributed(_start, ranks, stage, offload):
        assert measured == pytest.approx(planned, rel=0.02)


def _weights_for_the_parent(strategy: Any) -> tuple[int, bool]:
    """The most bytes on the device while a child of ``start_method`` "fork" hands its weights over, and if it does."""
    trainer = quiet_trainer(strategy=strategy(), max_steps=1, precision="bf16-mixed")
    module = Deep()
    trainer.fit(module, DataLoader(torch.randn(8, 256), 2))
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    output: Any = ChildrenLauncher(trainer.strategy, start_method="fork")._collect_rank_zero_results(trainer, None)
    most = torch.accelerator.max_memory_allocated() - before
    if output is None:
        return most, True
    saved = torch.load(output.weights_path, weights_only=True)
    kinds = {(type(value), value.device.type, value.is_meta) for value in saved.values()}
    return most, kinds == {(Tensor, "cpu", False)} and saved.keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize("strategy", [ShardFSDPStrategy, ShardDDPStrategy])
def test_children_hand_weights_over_one_tensor_at_a_time(strategy: Any) -> None:
    weight = 256 * 256 * 4
    for most, whole in run_distributed(_weights_for_the_parent, 2, strategy):
        assert whole
        # Of eight: the full one, and what it is gathered into.
        assert most <= 2.5 * weight
