"""Runs that are saved at any place of an epoch on two ranks go on with the same samples and random numbers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.resume.rng import seed_rng
from tests.harness import run_distributed
from tests.models import quiet_trainer
from tests.resume.support import Numbers

SAMPLES = 22  # in batches of 2 on 2 processes: 6 batches in an epoch


class Recorder(pl.LightningModule):
    """Notes what each step gets: epoch, batch index, samples, a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.rand(())
        self.seen.append((self.current_epoch, batch_idx, batch.tolist(), noise.item()))
        return self.layer(batch.float().view(-1, 1) / SAMPLES + noise).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.rand(())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Saver(pl.Callback):
    """Saves once for each pair of a hook and a step."""

    def __init__(self, wanted: list[tuple[str, int]]) -> None:
        self.wanted, self.at = wanted, dict[tuple[str, int], int]()

    def _save(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        key = hook, trainer.global_step
        if key in self.wanted and key not in self.at:
            self.at[key] = len(module.seen)
            trainer.save_checkpoint(f"{hook}{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._save("batch", trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._save("validation", trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._save("epoch", trainer, module)


def _fit(
    workers: int, settings: dict[str, Any], ckpt_path: str | None = None, saves: Any = (), seed: int = 1
) -> dict[str, Any]:
    seed_rng(seed)  # and not the sampler's
    module, saver, validation = Recorder(), Saver(list(saves)), "val_check_interval" in settings
    options = {"num_sanity_val_steps": 0, "limit_val_batches": None if validation else 0, **settings}
    trainer = quiet_trainer(strategy="shard_ddp", callbacks=[saver], **options)
    loaders = [DataLoader(Numbers(SAMPLES), 2, shuffle=True, num_workers=workers), DataLoader(Numbers(8), 4)]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    if ("end", 0) in saves:
        trainer.save_checkpoint("end.ckpt")
    weights = [parameter.tolist() for parameter in module.parameters()]
    return {"seen": module.seen, "weights": weights, "epoch": trainer.current_epoch, "at": saver.at}


def _interrupted(workers: int, first: dict[str, Any] | None, rest: dict[str, Any], saves: list[Any]) -> list[Any]:
    """The uninterrupted run, and for each save where it was and the run from it."""
    whole = _fit(workers, rest, saves=saves if first is None else ())
    if first is None:
        resumed = {f"{hook}{step}.ckpt": at for (hook, step), at in whole["at"].items()}
        assert len(resumed) == len(saves)
    else:
        before = _fit(workers, first, saves=[("end", 0)])
        resumed = {"end.ckpt": len(before["seen"])}
        assert before["seen"] == whole["seen"][: len(before["seen"])]
    return [whole, *((at, _fit(workers, rest, path, seed=77)) for path, at in resumed.items())]


EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 17, "max_epochs": -1}
CASES: dict[str, tuple[Any, dict[str, Any], list[tuple[str, int]]]] = {
    "epochs": (None, EPOCHS, [("batch", 9), ("batch", 6), ("epoch", 6)]),
    "steps": (None, STEPS, [("batch", 9), ("batch", 7), ("epoch", 12), ("batch", 6)]),
    "limited epochs": (None, EPOCHS | {"limit_train_batches": 4}, [("epoch", 8)]),
    "validation": (None, STEPS | {"val_check_interval": 3}, [("validation", 9), ("validation", 6), ("epoch", 6)]),
    "more epochs": ({"max_epochs": 1}, EPOCHS, []),
    "cut by max_steps": (STEPS | {"max_steps": 8}, STEPS, []),
}
WITH_WORKERS = [pytest.param(case, 2, marks=[] if case == "epochs" else pytest.mark.matrix) for case in CASES]
ALONE = [pytest.param(case, 0, marks=pytest.mark.matrix if case == "epochs" else []) for case in CASES]


@pytest.mark.parametrize(("case", "workers"), [*ALONE, *WITH_WORKERS])
def test_resumed_is_uninterrupted(case: str, workers: int) -> None:
    first, second = run_distributed(_interrupted, 2, workers, *CASES[case])
    for whole, *runs in (first, second):
        for at, resumed in runs:
            assert resumed["seen"] == whole["seen"][at:], at
            assert (resumed["weights"], resumed["epoch"]) == (whole["weights"], whole["epoch"]), at
    assert [step[2] for step in first[0]["seen"]] != [step[2] for step in second[0]["seen"]]
