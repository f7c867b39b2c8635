"""Bytes counted on live tensors against formulas: each storage once, each kind under each engine, activations."""

from __future__ import annotations

import gc
import math
import time
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_shard import ShardDeepSpeedStrategy
from lightning_shard.engines.memory_breakdown import module_tensors
from lightning_shard.engines.zero.config.fields import Stage3Options
from lightning_shard.memory import MemoryAccount
from lightning_shard.meters.memory_account import StepMeter
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer

CPU = torch.device("cpu")


class _Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.metric = MeanMetric()
        self.register_buffer("scale", torch.ones(3))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return self.head(x)


def _measured(net: _Net) -> MemoryAccount:
    optimizer = torch.optim.AdamW(net.parameters())
    meter = StepMeter(net, lambda: module_tensors(net, [optimizer], device=CPU), device=CPU)
    meter.watch_forward()
    loss = net(torch.zeros(5, dtype=torch.int64)).sum()
    meter.count_saved()
    loss.backward()
    meter.count_resident()
    optimizer.step()
    return meter.count_resident()


def test_a_step_of_a_whole_module() -> None:
    count = 6 * 4 + 4 * 8 + 8 + 8 * 4 + 4
    found = _measured(_Net()).device
    assert found.parameters == found.gradients == 4 * count
    # Two moments, and a count of steps for each of the 5 tensors.
    assert found.optimizer == 8 * count + 4 * 5
    # MeanMetric has two scalar states.
    assert found.buffers == 4 * 3 + 4 * 2
    # The indices (int64), and the inputs of the first layer, of GELU, of the second layer and of the head.
    assert found.activations == 5 * 8 + 4 * 5 * (4 + 8 + 8 + 4)
    assert (found.masters, found.gathered, found.communication) == (0, 0, 0)


def test_checkpointing_keeps_the_inputs_of_what_it_recomputes() -> None:
    assert _measured(_Net(recompute=True)).device.activations == 5 * 8 + 4 * 5 * (4 + 4)


class _Meter(pl.Callback):
    def __init__(self) -> None:
        self.account: MemoryAccount | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = trainer.strategy.memory.account()
        self.meter = trainer.strategy.memory.step_meter()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.meter.watch_forward()

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.meter.count_saved()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.meter.count_resident()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            self.account = self.meter.count_resident()
            self.between = trainer.strategy.memory.account()


WIDTH, DEPTH = 64, 3


def _account(strategy: str, precision: str) -> tuple[MemoryAccount, MemoryAccount, MemoryAccount]:
    meter = _Meter()
    own = build(strategy, hooks_use_accessor=True)
    trainer = quiet_trainer(strategy=own, precision=precision, max_steps=2, callbacks=[meter])
    trainer.fit(TinyLM(width=WIDTH, depth=DEPTH), loader())
    assert meter.account is not None
    return meter.start, meter.account, meter.between


def _sizes() -> tuple[int, int, int]:
    """Elements that are trained, that are frozen, and of the largest unit."""
    module = TinyLM(width=WIDTH, depth=DEPTH)
    module.configure_model()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trained, WIDTH, sum(p.numel() for p in module.blocks[0].parameters())


def _about(value: int, expected: float, *, padding: int = 0) -> bool:
    """Equal, but for the padding of what is cut and a step count for each tensor of the optimizer."""
    return expected <= value <= expected + padding


@pytest.mark.parametrize("strategy", ["shard_fsdp", "shard_fsdp_grad_op", "shard_fsdp_offload"])
def test_fsdp(strategy: str) -> None:
    trained, frozen, unit = _sizes()
    # Less than a row for each of some 20 tensors.
    padding = 20 * 4 * WIDTH * 4
    results = run_distributed(_account, 2, strategy, "bf16-mixed")
    states = [found.host if strategy == "shard_fsdp_offload" else found.device for _, found, _ in results]
    # Not padded: uneven on two ranks, with a step count for each of 21 tensors.
    assert sum(each.optimizer for each in states) == 8 * trained + 2 * 21 * 4
    for start, found, between in results:
        shards = found.host if strategy == "shard_fsdp_offload" else found.device
        assert _about(shards.parameters, 4 * (trained + frozen) / 2, padding=padding)
        assert _about(shards.gradients, 4 * trained / 2, padding=padding)
        assert found.device.total == found.device.gathered + found.device.activations + found.device.buffers + (
            0 if shards is found.host else shards.parameters + shards.gradients + shards.optimizer
        )
        # The root and one unit in the compute dtype at least; everything where nothing is cut again after forward.
        least = trained + frozen if strategy == "shard_fsdp_grad_op" else trained + frozen - (DEPTH - 1) * unit
        assert found.device.gathered >= 2 * least
        if strategy != "shard_fsdp_grad_op":
            assert found.device.gathered < 2 * (trained + frozen)
        assert between.device.gathered == 0
        assert (start.host if shards is found.host else start.device).parameters == shards.parameters


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_zero(stage: int, offload: bool) -> None:
    trained, frozen, _ = _sizes()
    name = f"shard_deepspeed_stage_{stage}{'_offload' if offload else ''}_aligned"
    # Stage 3 pads each of some 20 parameters, others a group.
    padding = 20 * 4 * 4
    for _, found, _ in run_distributed(_account, 2, name, "bf16-mixed"):
        stepping = found.host if offload else found.device
        assert _about(stepping.masters, 4 * trained / 2, padding=padding + 4 * WIDTH)
        assert _about(stepping.optimizer, 8 * trained / 2, padding=2 * padding)
        assert _about(stepping.gradients, 4 * trained / 2, padding=math.inf)
        if stage == 3:
            pieces = found.host if offload else found.device
            assert _about(pieces.parameters, 2 * (trained + frozen) / 2, padding=padding)
            assert found.device.gathered > 0
        else:
            assert _about(found.device.parameters, 2 * (trained + frozen), padding=padding)
            assert found.device.gathered == 0
        assert found.device.activations > 0
        assert found.nvme.total == 0
        if offload:
            assert found.device.masters == found.device.optimizer == 0


def _resident() -> tuple[list[int], int]:
    seen: list[int] = []

    class Look(_Meter):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            super().on_train_start(trainer, module)
            # Listed now: reading them off a module in forward would gather them.
            parameters = list(module.parameters())
            for block in module.blocks:
                block.register_forward_hook(lambda *_: seen.append(sum(p.data.nbytes for p in parameters)))

    small = Stage3Options(
        param_persistence_threshold=0, max_live_parameters=1, max_reuse_distance=1, prefetch_bucket_size=1
    )
    strategy = ShardDeepSpeedStrategy(stage=3, aligned=True, hooks_use_accessor=True, stage3=small)
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=3, callbacks=[Look()])
    trainer.fit(TinyLM(width=WIDTH, depth=DEPTH), loader())
    return seen, 2 * 2 * WIDTH


def test_measuring_does_not_make_zero_3_gather() -> None:
    for seen, root in run_distributed(_resident, 2):
        # After a block nothing is whole but the root's own two parameters, in the measured first step and later.
        assert len(seen) == 3 * DEPTH
        assert max(seen) <= root


def left_of_a_run(name: str) -> tuple[list[bool], int]:
    """Which of its parts are alive after the second run in a process, and how many groups this made."""
    groups = 0
    for _ in range(2):
        before = groups
        module = TinyLM()
        trainer = quiet_trainer(strategy=name, max_steps=2)
        trainer.fit(module, loader())
        parts = (module, trainer, trainer.strategy, trainer.optimizers[0], module.head.weight)
        held = [weakref.ref(one) for one in parts]
        del module, trainer, parts
        groups = dist.get_pg_count()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        gc.collect()
        if all(one() is None for one in held):
            break
        time.sleep(0.1)  # a thread of the backend may let go of the last tensor a moment later
    return [one() is not None for one in held], groups - before


@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "shard_ddp_aligned",
            "shard_fsdp_hybrid_aligned",
            "shard_deepspeed_stage_3",
            "shard_deepspeed_stage_2_offload",
        ],
        *(0, 1, 2),
    ),
)
def test_nothing_of_a_run_outlives_it(name: str) -> None:
    """Else each trial of a sweep in one process would hold its model, optimizer state and groups."""
    assert run_distributed(left_of_a_run, 2, name) == [([False] * 5, 0)] * 2
