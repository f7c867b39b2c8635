"""A module that says which samples it saw, its data, and fits of it that end in the same parameters everywhere."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import all_parameters, quiet_trainer
from tests.strategies.engines import ENGINES, ZERO

# bf16-mixed takes other ways through the engines: casts, and fully_shard over one rank under shard_ddp.
PRECISIONS = pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
COUNT = 24


class Indexed(pl.LightningModule):
    """A regressor whose batches hold their samples' indices, so that a test sees which rank got what."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.lr = lr
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}
        self.modes: dict[str, set[tuple[bool, bool]]] = defaultdict(set)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)

    def _note(self, stage: str, index: Tensor) -> None:
        self.seen[stage].append(index.tolist())
        self.modes[stage].add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def loss(self, batch: Any, stage: str) -> Tensor:
        index, x = batch
        self._note(stage, index)
        return (self(x).float() - x.sum(-1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, "test"), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        index, x = batch
        self._note("predict", index)
        return index, self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def samples(count: int = COUNT) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))


def data(batch_size: int = 2, *, count: int = COUNT, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size, **kwargs)


def build(seed: int = 1, **kwargs: Any) -> Indexed:
    # Not `seed_everything`, whose environment variable would stay in the test's own process.
    torch.manual_seed(seed)
    return Indexed(**kwargs)


def refusal(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The error of ``fn(*args, **kwargs)`` as its type's name and message; on a worker, which lives on."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


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
        "batches": str(module.seen["train"]),
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
