"""Optimizer slots by name under ZeRO: read and written as under FSDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_shard import full_tensor, set_full_tensor
from lightning_shard.errors import ConfigurationError
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences
from tests.strategies.zero import OFFLOADED, STAGES


class Touch(pl.Callback):
    """Sets a slot whose size does not divide by 3 ranks."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            moment = full_tensor(trainer, "blocks.0.down.bias", "exp_avg")
            set_full_tensor(trainer, "blocks.0.down.bias", moment.sign() * 0.5, "exp_avg")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            assert full_tensor(trainer, "frozen", "exp_avg") is None
            with pytest.raises(ConfigurationError, match="frozen has no exp_avg now: look with full_tensor"):
                set_full_tensor(trainer, "frozen", full_tensor(trainer, "frozen"), "exp_avg")


def fit_all(engines: list[str], precision: str) -> dict[str, Any]:
    found = {}
    for engine in engines:
        pl.seed_everything(1, verbose=False)
        final, strategy = Final(), ENGINES[engine](aligned=True)
        trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=3, callbacks=[Touch(), final])
        trainer.fit(TinyLM(), loader())
        found[engine] = {**final.parameters, **final.optimizer}
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "precision"), [(2, "32-true"), (3, "bf16-mixed")])
def test_slots_are_read_and_written_alike(ranks: int, precision: str) -> None:
    engines = ["ddp", "full", *STAGES, *OFFLOADED]
    first, *others = run_distributed(fit_all, ranks, engines, precision, timeout=300)
    for engine, run in first.items():
        assert all(differences(run, other[engine]) == {} for other in others)
        # At three ranks the order of a sum depends on the engine.
        assert ranks == 3 or differences(run, first["full"]) == {}, engine
