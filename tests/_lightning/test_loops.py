"""What engines are told of the actions that Lightning names."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard._lightning import Replacements, loops


class Module(BoringModel):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


class Ends(pl.Callback):
    def on_validation_batch_end(self, *args: Any) -> None: ...


def test_engines_are_told_of_the_hooks_that_someone_has() -> None:
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Ends(), TQDMProgressBar()], logger=False)
    trainer.strategy.connect(Module())
    begun: list[str] = []
    ended: list[str] = []
    replacements = Replacements()
    loops.follow_actions(replacements, trainer, (begun.append, ended.append))
    told = [
        "[LightningModule]Module.on_before_zero_grad",
        "[Callback]Ends.on_validation_batch_end",
        "[Callback]unknown.on_validation_batch_end",
        "[Strategy]SingleDeviceStrategy.training_step",
        "optimizer_step",
    ]
    untold = [
        "[LightningModule]Module.on_before_backward",
        "[Callback]Ends.on_before_zero_grad",
        "[Callback]TQDMProgressBar.on_validation_batch_end",
    ]
    for action in (*told, *untold):
        with trainer.profiler.profile(action):  # type: ignore[attr-defined]
            assert (begun[-1] == action) == (action in told)
    assert begun == ended == told
    replacements.restore()
    with trainer.profiler.profile("optimizer_step"):  # type: ignore[attr-defined]
        assert begun == told
