"""Fits of one module under DDP, FSDP and by hand, which end in the same parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from tests.harness import run_distributed
from tests.models import all_parameters, quiet_trainer
from tests.strategies.engines import ENGINES, ZERO
from tests.strategies.indexed import data


def _fit(
    strategy: str, build_module: Callable[..., Any], precision: str, options: dict[str, Any], flags: dict[str, Any]
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = build_module()
    # All accumulate in the same order, whatever the plain names' defaults are. ZeRO's is fixed.
    options = {"accumulate_sync": "micro_batch", **options}
    if strategy in ZERO:
        del options["accumulate_sync"]
    trainer = quiet_trainer(
        strategy=ENGINES[strategy](**options),
        precision=precision,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **flags},
    )
    trainer.fit(module, data(shuffle=True), data())
    return {
        # What was stepped: after a fit under stage 3 the module has copies in the compute dtype.
        "parameters": all_parameters(trainer),
        "steps": trainer.global_step,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "notes": getattr(module, "notes", None),
        "batches": str(module.seen["train"]) if hasattr(module, "seen") else module.batches,
    }


def _fit_all(strategies: list[str], *args: Any) -> dict[str, dict[str, Any]]:
    return {strategy: _fit(strategy, *args) for strategy in strategies}


def same_everywhere(
    module: Callable[..., Any],
    precision: str,
    *,
    strategies: tuple[str, ...] = ("ddp", "full"),
    options: dict[str, Any] | None = None,
    ranks: int = 2,
    **flags: Any,
) -> dict[str, Any]:
    """Fit under each strategy; all parameters, metrics and notes must agree bitwise, on ranks of different batches."""
    runs = run_distributed(_fit_all, ranks, list(strategies), module, precision, options or {}, flags)
    first = runs[0][strategies[0]]
    for rank, strategy in itertools.product(range(ranks), strategies):
        run = runs[rank][strategy]
        assert run["steps"] == first["steps"]
        for name, value in first["parameters"].items():
            assert torch.equal(run["parameters"][name], value), (rank, strategy, name)
        assert run["notes"] == first["notes"], (rank, strategy)
        assert run["metrics"] == first["metrics"], (rank, strategy)
    assert len({repr(run[strategies[0]]["batches"]) for run in runs}) == ranks
    return first
