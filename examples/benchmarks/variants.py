"""Contestants that also clip, accumulate, validate or log: ``NAME+FEATURE``, by hand and under Trainers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from examples.benchmarks.llama import Llama
from examples.benchmarks.processes import Place
from examples.benchmarks.python_loops import LOOPS, Loop, replicated, sharded
from examples.benchmarks.trainers import Task, TrainerLoop
from examples.benchmarks.turns import Contestant, Plan
from examples.benchmarks.workload import Batch, Workload, build_model, build_optimizer, loss_of, stream


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Additions to a loop that trains on each batch."""

    clip: float | None = None
    """Largest norm of the gradients."""
    accumulate: int = 1
    """Batches for each optimizer step."""
    sync: bool = True
    """Reduce the gradients of each of them, not of the sum."""
    validation: int = 0
    """Batches that are evaluated after each step."""
    logged: int = 0
    """Values that are logged in each step."""


FEATURES = {
    "": Feature(),
    "clip": Feature(clip=1.0),
    "validate": Feature(validation=4),
    "log": Feature(logged=20),
    "micro_batch": Feature(accumulate=4),
    "boundary": Feature(accumulate=4, sync=False),
}


def build_variant(name: str, work: Workload, place: Place, plan: Plan) -> Contestant:
    """The contestant ``NAME`` or ``NAME+FEATURE``."""
    base, _, key = name.partition("+")
    feature = FEATURES[key]
    if not key and base in LOOPS:
        return LOOPS[base](work, place)
    if base in HAND:
        return by_hand(work, place, HAND[base], feature)
    options: dict[str, Any] = {"max_steps": plan.total // feature.accumulate + 1}
    if feature.clip is not None:
        options["gradient_clip_val"] = feature.clip
    if feature.accumulate > 1:
        options["accumulate_grad_batches"] = feature.accumulate
        if base in ACCUMULATING:
            options["strategy"] = ACCUMULATING[base](
                accumulate_sync="micro_batch" if feature.sync else "boundary",
                activation_checkpointing=work.checkpointing,
                compile=work.compile,
            )
    if feature.validation:
        options.update(limit_val_batches=feature.validation, val_check_interval=1, num_sanity_val_steps=0)
    return TrainerLoop(base, work, place, steps=plan.total, task=LOGGING if feature.logged else Task, **options)


class LoggingTask(Task):
    """Logs twenty values in each step, as the progress bar and loggers would have them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, and more of it."""
        loss = super().training_step(batch, batch_idx)
        for index in range(FEATURES["log"].logged):
            self.log(f"value_{index}", loss.detach(), on_step=True, on_epoch=index % 2 == 0)
        return loss


LOGGING = LoggingTask


def _fsdp(**options: Any) -> Any:
    from lightning_shard import ShardFSDPStrategy

    return ShardFSDPStrategy(**options)


def _ddp(**options: Any) -> Any:
    from lightning_shard import ShardDDPStrategy

    return ShardDDPStrategy(**options)


HAND: dict[str, Callable[[Llama, Workload, Place], nn.Module]] = {"hand_ddp": replicated, "hand_fsdp": sharded}
ACCUMULATING = {
    "shard_fsdp": _fsdp,
    "shard_fsdp_aligned": partial(_fsdp, aligned=True),
    "shard_ddp": _ddp,
    "shard_ddp_aligned": partial(_ddp, aligned=True),
}


def by_hand(
    work: Workload, place: Place, shard: Callable[[Llama, Workload, Place], nn.Module], feature: Feature
) -> Loop:
    """The loop of a user of torch, with a feature."""
    model = shard(build_model(work).to(place.device), work, place)
    optimizer = build_optimizer(work, model.parameters())
    batches = itertools.count(1)
    held_out = stream(work, place.rank, place.device)

    def step(batch: Batch) -> Tensor:
        inputs, targets = batch
        last = next(batches) % feature.accumulate == 0
        with _syncing(model, last or feature.sync):
            loss = loss_of(work, model(inputs), targets)
            (loss / feature.accumulate).backward()
        if not last:
            return loss.detach()
        if feature.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), feature.clip)
        optimizer.step()
        optimizer.zero_grad()
        if feature.validation:
            _evaluate(work, model, itertools.islice(held_out, feature.validation))
        return loss.detach()

    return Loop(step, work, place)


@torch.no_grad()
def _evaluate(work: Workload, model: nn.Module, batches: Any) -> None:
    model.eval()
    total = sum(loss_of(work, model(inputs), targets) for inputs, targets in batches)
    assert isinstance(total, Tensor)
    total.item()
    model.train()


def _syncing(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    if isinstance(model, FSDPModule):
        return _fsdp_syncing(model, enabled)
    return nullcontext() if enabled else model.no_sync()  # type: ignore[operator]


@contextmanager
def _fsdp_syncing(model: FSDPModule, enabled: bool) -> Any:
    model.set_requires_gradient_sync(enabled)
    yield
