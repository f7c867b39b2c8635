"""The Trainer's flags for its loops, its profiler and its checks, and when gradients are there."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters
from tests.strategies.indexed import ALL, BOTH, Indexed, build, data, flat, refusal

# Loops


def _fit(strategy: str, precision: str, flags: dict[str, Any], loader: dict[str, Any] | None = None) -> dict[str, Any]:
    module = build()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = quiet_trainer(strategy=strategy, precision=precision, **flags)
    trainer.fit(module, data(shuffle=True, **(loader or {})), data())
    end = whole_parameters(module)
    return {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "events": module.events,
        "seen": module.seen,
        "moved": any(not torch.equal(start[name], end[name]) for name in start),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "end": end,
    }


def fits(strategy: str, precision: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_fit(strategy, precision, flags) for flags in runs]


@ALL
def test_flags_that_limit_and_time_the_loops(strategy: str, precision: str) -> None:
    runs = [
        {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 2},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.25, "max_epochs": 1, "num_sanity_val_steps": 0},
        {"val_check_interval": 0.5, "max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 9, "num_sanity_val_steps": 0},
        {"fast_dev_run": 2},
        {"overfit_batches": 2, "max_epochs": 3},
        {"num_sanity_val_steps": 3, "max_steps": 1},
        {"num_sanity_val_steps": -1, "max_steps": 1, "limit_val_batches": 0},
    ]
    ranks = run_distributed(fits, 2, strategy, precision, runs)
    limited, half, twice, by_steps, dev, overfit, sanity, no_val = zip(*ranks, strict=True)
    for rank in range(2):
        assert (limited[rank]["steps"], limited[rank]["epochs"]) == (6, 2)
        # 24 samples are 12 for each rank, 6 batches of 2.
        assert limited[rank]["events"] == ["val at 0", "train epoch", "val at 3", "train epoch", "val at 6"]
        assert (half[rank]["steps"], len(half[rank]["seen"]["val"])) == (3, 1)
        assert twice[rank]["events"] == ["train epoch", "val at 3", "val at 6"]
        assert by_steps[rank]["events"] == ["train epoch", "val at 4", "train epoch", "val at 8"]
        assert (dev[rank]["steps"], len(dev[rank]["seen"]["val"])) == (2, 2)
        batches = overfit[rank]["seen"]["train"]
        assert batches == batches[:2] * 3
        assert len(set(flat(batches))) == 4
        assert (sanity[rank]["events"][0], len(sanity[rank]["seen"]["val"])) == ("val at 0", 3)
        assert no_val[rank]["seen"]["val"] == []
        assert all(run["moved"] for run in ranks[rank])
    assert not set(flat(overfit[0]["seen"]["train"])) & set(flat(overfit[1]["seen"]["train"]))
    assert [run["metrics"] for run in ranks[0]] == [run["metrics"] for run in ranks[1]]


def _timed(strategy: str) -> tuple[int, float, bool]:
    module = build()
    # Only this rank's clock is late: the decision must be common.
    module.on_train_batch_start = lambda batch, index: time.sleep(0.02 * dist.get_rank())
    trainer = quiet_trainer(strategy=strategy, max_time={"milliseconds": 700}, max_epochs=-1)
    began = time.monotonic()
    trainer.fit(module, data())
    return trainer.global_step, time.monotonic() - began, trainer.should_stop


@BOTH
def test_max_time_stops_all_ranks_after_the_same_step(strategy: str) -> None:
    (steps, seconds, stopped), (other_steps, _, other_stopped) = run_distributed(_timed, 2, strategy)
    assert steps == other_steps > 0
    assert stopped
    assert other_stopped
    assert 0.7 < seconds < 60


@ALL
def test_profiler_determinism_and_anomaly_detection(strategy: str, precision: str) -> None:
    plain, *others = run_distributed(_debugged, 2, strategy, precision)[0]
    for parameters in others:
        assert all(torch.equal(plain[name], parameters[name]) for name in plain)


def _debugged(strategy: str, precision: str) -> list[dict[str, Tensor]]:
    flags: list[dict[str, Any]] = [{}, {"deterministic": True}, {"detect_anomaly": True}, {"profiler": "simple"}]
    results = []
    for extra in flags:
        module = build()
        trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, **extra)
        trainer.fit(module, data(), data())
        results.append(whole_parameters(module))
        if "deterministic" in extra:
            assert torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(False)
        if "profiler" in extra:
            name = f"[Strategy]{type(trainer.strategy).__name__}.training_step"
            assert len(trainer.profiler.recorded_durations[name]) == 4
            assert name in trainer.profiler.summary()
    return results


class NotANumber(Indexed):
    def loss(self, batch: Any, stage: str) -> Tensor:
        # The square root of zero has an infinite slope, and that times zero is no number.
        return super().loss(batch, stage) + (self.head.bias * 0).sqrt().sum()


def _anomaly(strategy: str) -> None:
    quiet_trainer(strategy=strategy, detect_anomaly=True, max_steps=2).fit(NotANumber(), data())


@BOTH
def test_anomaly_detection_finds_the_operation(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _anomaly, strategy):
        assert kind == "RuntimeError"
        assert "'MulBackward0' returned nan" in message


# Gradients


def _has_gradients(trainer: pl.Trainer) -> bool:
    # Those that are stepped: inside a step FSDP has others in their place.
    return any(p.grad is not None for group in trainer.optimizers[0].param_groups for p in group["params"])


def _held_in_forward(strategy: str, precision: str, watched: bool, **flags: Any) -> tuple[list[bool], list[bool]]:
    """Whether there were gradients when each batch's forward began, and when they were dropped, where that is seen."""

    class Looking(Indexed):
        held: list[bool] = []  # noqa: RUF012

        def training_step(self, *args: Any) -> Any:
            self.held.append(_has_gradients(self.trainer))
            return super().training_step(*args)

    class Watching(pl.Callback):
        seen: list[bool] = []  # noqa: RUF012

        def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            self.seen.append(_has_gradients(trainer))

    torch.manual_seed(1)
    module, watching = Looking(), Watching()
    callbacks = [watching] if watched else []
    quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, callbacks=callbacks, **flags).fit(
        module, data()
    )
    return module.held, watching.seen


@pytest.mark.parametrize(
    ("strategy", "precision"), sampled([("shard_ddp", "32-true"), ("shard_fsdp", "bf16-mixed")], 1)
)
def test_no_forward_runs_beside_the_gradients_of_the_step_before(strategy: str, precision: str) -> None:
    (held, _), _ = run_distributed(_held_in_forward, 2, strategy, precision, False)
    assert len(held) > 2
    assert not any(held)
    # Those of earlier micro-batches stay, and those that a hook is to see.
    (held, _), _ = run_distributed(_held_in_forward, 2, strategy, precision, False, accumulate_grad_batches=2)
    assert held == [index % 2 == 1 for index in range(len(held))]
    (held, seen), _ = run_distributed(_held_in_forward, 2, strategy, precision, True)
    assert seen == held == [index > 0 for index in range(len(held))]
