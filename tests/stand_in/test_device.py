"""What the stand-in for a GPU finds; these tests run on it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import OptimizerOffload, ShardDeepSpeedStrategy, ZeroBuckets
from lightning_shard.engines.optimizer_probe import Needs, probe
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.engines.zero import flat_layout
from lightning_shard.planning.model_facts import Training, facts_of
from lightning_shard.planning.predict import start_points
from lightning_shard.resume.rng import rng_state, same
from tests import stand_in
from tests.harness import run_distributed
from tests.models import TinyLM, quiet_trainer
from tests.optimizers import Noisy
from tests.strategies.engines import NORM, differences
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


def _needs() -> tuple[Needs, bool]:
    before = rng_state()
    parameters = [nn.Parameter(torch.zeros(4, 4, device=stand_in.NAME))]
    needs = probe(Noisy(parameters), dtype=torch.float32, aligned=True, alone=True)
    return needs, same(before, rng_state())


def test_an_optimizer_draws_from_the_generator_of_its_device() -> None:
    assert run_distributed(_needs, 1) == [(Needs(full=True, draws=True), True)]


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
