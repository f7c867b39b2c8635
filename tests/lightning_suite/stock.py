"""Runs of one case under stock ``ddp`` and under a strategy of this package, which have to show the same.

A case is a function that gets `Runs`, fits or evaluates as often as it likes, and returns what it saw: numbers, names
of files, calls of hooks. It runs on two processes under stock Lightning's ``ddp`` first. One that ``leaves_out``
parameters in some backward passes tells DDP so.
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.registry import build
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole
from tests.strategies.indexed import refusal

STRATEGIES = ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_2"]
COUNT, WIDTH = 16, 4
# Of fp32 values after some steps: the clip formula sums the norm in fp64, and engines add micro-batches up in other
# orders.
TOLERANCE = 1e-5


def data(batch_size: int = 2, *, count: int = COUNT, shuffle: bool = True, **kwargs: Any) -> DataLoader[Any]:
    """Shuffled: of others stock Lightning shuffles those for training, and this package keeps their order."""
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(torch.arange(count), x), batch_size=batch_size, shuffle=shuffle, **kwargs)


def held_out(batch_size: int = 2, *, count: int = 8, **kwargs: Any) -> DataLoader[Any]:
    return data(batch_size, count=count, shuffle=False, **kwargs)


class Net(pl.LightningModule):
    """A regressor that notes its batches."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.lr = lr
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        index, x = batch
        self.seen.append((self.trainer.state.stage.value, index.tolist()))
        return (self(x) - x.sum(-1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class Runs:
    """Makes the Trainers of a case, all with the strategy that it is run under."""

    def __init__(self, strategy: str, folder: Path, leaves_out: bool) -> None:
        self.name, self.folder, self.leaves_out = strategy, folder, leaves_out

    @property
    def strategy(self) -> Any:
        if not self.leaves_out or self.name not in ("ddp", "shard_ddp"):
            return self.name
        return "ddp_find_unused_parameters_true" if self.is_stock else build(self.name, find_unused_parameters=True)

    @property
    def is_stock(self) -> bool:
        return self.name == "ddp"

    def trainer(self, **flags: Any) -> pl.Trainer:
        return quiet_trainer(**{"strategy": self.strategy, "default_root_dir": str(self.folder), **flags})

    def seeded(self, make: Callable[[], Any] = Net) -> Any:
        pl.seed_everything(1, verbose=False)
        return make()


Case = Callable[[Runs], Any]


def cases(module: str) -> list[Case]:
    """The cases of a module: its own functions of `Runs` alone, but those that are refused."""
    own = [each for each in vars(sys.modules[module]).values() if getattr(each, "__module__", "") == module]
    return [each for each in own if list(getattr(each, "__annotations__", {})) == ["runs", "return"]]


def plain(value: Any) -> Any:
    """What can be compared with ``==``: tensors as lists of numbers."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, float) and value != value:
        return "nan"
    return value


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: whole(p).tolist() for name, p in module.named_parameters()}


def files(folder: Path | str = ".") -> list[str]:
    """Checkpoints under the folder by name, whether files or directories, once all ranks are here."""
    dist.barrier()
    found = {str(path.relative_to(folder)) for path in Path(folder).rglob("*.ckpt")}
    dist.barrier()
    return sorted(name for name in found if ".ckpt/" not in name)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def _run(case: Case, strategy: str) -> Any:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)
    folder = Path.cwd() / f"{case.__name__}-{strategy}"
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    dist.barrier()
    os.chdir(folder)
    try:
        return plain(case(Runs(strategy, folder, getattr(case, "leaves_out", False))))
    finally:
        os.chdir(before)


@functools.cache
def _stock(case: Case) -> Any:
    return _run(case, "ddp")


def refused(case: Case, strategy: str) -> tuple[str, str]:
    """The error that the case ends with under the strategy."""
    return refusal(_run, case, strategy)


def observe(case: Case, strategy: str) -> tuple[Any, Any]:
    """What stock Lightning and the strategy show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _stock(case), _run(case, strategy)


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        lines = []
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                what = "missing" if key not in found else f"not in stock: {found[key]!r}"
                lines.append(f"{where}.{key}: {what}"[:400])
            else:
                lines += differences(found[key], expected[key], f"{where}.{key}")
        return lines
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{where}[{i}]")]
    numbers = isinstance(found, float) and isinstance(expected, float)
    if found == expected or (numbers and math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)):
        return []
    return [f"{where}: {found!r}\n   stock {expected!r}"[:3000]]


def check(case: Case, strategy: str) -> None:
    """Both runs show the same on both ranks."""
    wrong = []
    for rank, (expected, found) in enumerate(run_distributed(observe, 2, case, strategy)):
        wrong += differences(found, expected, f"rank {rank}")
    assert not wrong, "\n".join(wrong)
