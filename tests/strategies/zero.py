"""Fits under the stages of ZeRO, and the check that they take the steps of FSDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from tests.harness import run_distributed
from tests.models import Final, TinyLM, all_parameters, loader, quiet_trainer
from tests.strategies.engines import ENGINES, differences

STAGES = ["zero_1", "zero_2", "zero_3"]
OFFLOADED = ["zero_2_offload", "zero_3_offload"]


class Manual(TinyLM):
    """Clips and steps by hand, after every ``every`` backward passes."""

    def __init__(self, every: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class Keeps(Manual):
    """Leaves the gradients of a step for the next one, which torch adds to them."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        optimizer: Any = super().optimizers(use_pl_optimizer)
        vars(optimizer)["zero_grad"] = lambda: None
        return optimizer


class Start(pl.Callback):
    """Keeps the full masters at the start of a fit."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = all_parameters(trainer)


class WithoutOptimizer(TinyLM):
    def configure_optimizers(self) -> None:
        return None


def fit(
    engine: str, kind: type[TinyLM], precision: str, strategy: dict[str, Any], trainer: dict[str, Any], **model: Any
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = kind(**model), Final()
    settings = {"aligned": True, **(strategy if engine.startswith("zero") else {})}
    if "aligned" in strategy:
        settings["aligned"] = strategy["aligned"]
    loop = quiet_trainer(
        strategy=ENGINES[engine](**settings),
        precision=precision,
        callbacks=[final],
        **{"max_steps": 6, **trainer},
    )
    loop.fit(module, loader(), loader(count=16, shuffle=False))
    ledger = loop.strategy.ledger
    return {
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "losses": module.losses,
        "ledger": ledger.entries,
        "reductions": ledger.reduced_in,
    }


def fit_all(engines: list[str], *args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return {engine: fit(engine, *args, **kwargs) for engine in engines}


def check_equal(engines: list[str], kind: type[TinyLM], precision: str = "32-true", **kwargs: Any) -> Any:
    """Every engine takes the steps of FSDP, bit by bit."""
    arguments = (kwargs.pop("strategy", {}), kwargs.pop("trainer", {}))
    ranks = run_distributed(fit_all, 2, ["full", *engines], kind, precision, *arguments, timeout=240, **kwargs)
    for rank in ranks:
        for engine in engines:
            for part in ("parameters", "optimizer"):
                assert differences(rank["full"][part], rank[engine][part]) == {}, (engine, part)
            assert rank[engine]["losses"] == rank["full"]["losses"], engine
    assert ranks[0]["full"]["losses"] != ranks[1]["full"]["losses"]
    return ranks
