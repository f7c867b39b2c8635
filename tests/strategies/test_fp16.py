"""fp16 under a dynamic loss scale: the same numbers and the same skipped steps under every engine, and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import LossScaling, ShardPrecision
from lightning_shard.errors import DataError, PrecisionError
from tests.harness import DistributedError, run_distributed
from tests.models import Final, TinyLM, all_parameters, loader, quiet_trainer
from tests.resume import test_resume
from tests.strategies.engines import AT_2, BATCH, BOUNDARY, ENGINES, NORM, TWICE, VALUE, Mapped, differences
from tests.strategies.test_parity import by_hand

STEPS = 20
# Far too large at first, and it grows again after every three good steps: overflows at the start and later.
SCALING = LossScaling(initial=2.0**22, growth_interval=3)


class Record(pl.Callback):
    """Of each optimizer step: the scale, whether it was skipped, the learning rate after it, and the logged values."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.batches: list[Any] = []
        self._before: tuple[int, dict[str, Tensor], float] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.batches.append(batch)
        scale = trainer.precision_plugin.loss_scale  # type: ignore[attr-defined]
        self._before = trainer.global_step, all_parameters(trainer), scale

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        assert self._before is not None
        step, parameters, scale = self._before
        if trainer.global_step == step:
            return
        logged = {name: value.item() for name, value in trainer.callback_metrics.items() if name != "train_loss"}
        self.steps.append(
            {
                "scale": scale,
                "skipped": trainer.precision_plugin.step_skipped,  # type: ignore[attr-defined]
                "unchanged": differences(parameters, all_parameters(trainer)) == {},
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "logged_scale": logged["loss_scale"],
                "norm": logged.get("grad_norm"),
            }
        )


def fit(engine: str, precision: str, strategy: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, record, final = TinyLM(), Record(), Final()
    loop = quiet_trainer(
        strategy=ENGINES[engine](**{"aligned": True, **strategy}),
        plugins=[ShardPrecision(precision, loss_scale=SCALING)],  # type: ignore[arg-type]
        max_steps=STEPS,
        callbacks=[record, final],
        **trainer,
    )
    loop.fit(module, DataLoader(Mapped(), batch_size=BATCH, shuffle=True))
    assert loop.global_step == STEPS == len(record.steps)
    return {
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "steps": record.steps,
        "batches": record.batches,
        "losses": module.losses,
    }


def fit_all(engines: list[str], *args: Any) -> dict[str, dict[str, Any]]:
    return {engine: fit(engine, *args) for engine in engines}


def compare(
    precision: str,
    *,
    strategy: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    engines: list[str] = AT_2,
) -> list[dict[str, dict[str, Any]]]:
    ranks = run_distributed(fit_all, 2, engines, precision, strategy or {}, trainer or {}, timeout=300)
    first = ranks[0][engines[0]]
    check_steps(first["steps"])
    for rank in ranks:
        for engine, run in rank.items():
            assert run["steps"] == first["steps"], engine
            for part in ("parameters", "optimizer"):
                assert all(value.dtype == torch.float32 for value in run[part].values())
                assert differences(run[part], first[part]) == {}, (engine, part)
            assert run["losses"] == rank[engines[0]]["losses"], engine
    assert first["losses"] != ranks[1][engines[0]]["losses"]
    assert sum(first["losses"][-3:]) < 0.95 * sum(first["losses"][:3])
    return ranks


def check_steps(steps: list[dict[str, Any]]) -> None:
    skipped = [step["skipped"] for step in steps]
    # At the start, and again after the scale has grown.
    assert skipped[0]
    assert True in skipped[skipped.index(False) :]
    taken = good = 0
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        taken += not step["skipped"]
        good = 0 if step["skipped"] else good + 1
        assert step["logged_scale"] == step["scale"]
        assert step["unchanged"] is step["skipped"]
        assert step["lr"] == 1e-2 * (1.0 / (1.0 + 0.1 * taken))
        grown, good = good == SCALING.growth_interval, good % SCALING.growth_interval
        factor = 0.5 if step["skipped"] else 2.0 if grown else 1.0
        assert after is None or after["scale"] == step["scale"] * factor


def test_engines_agree_bitwise_and_skip_the_same_steps() -> None:
    # An overflow is no gradient norm that an error is asked for.
    compare("16-mixed", trainer=NORM, strategy={"error_if_nonfinite": True}, engines=["ddp", "full"])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", [None, {"accumulate_sync": "micro_batch"}, BOUNDARY], ids=["1", "2", "2_late"])
@pytest.mark.parametrize("clip", [{}, NORM, VALUE], ids=["unclipped", "norm", "value"])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_engines_agree_bitwise_in_every_combination(
    precision: str, clip: dict[str, Any], strategy: dict[str, Any] | None
) -> None:
    compare(precision, strategy=strategy, trainer={**clip, **(TWICE if strategy else {})})


@pytest.mark.matrix
def test_a_run_is_that_of_torchs_grad_scaler() -> None:
    ranks = compare("16-mixed", trainer=NORM, engines=["full"])
    runs = [rank["full"] for rank in ranks]
    batches = [list(parts) for parts in zip(*(run["batches"] for run in runs), strict=True)]
    [(found, scales)] = run_distributed(by_hand, 1, batches, "16-mixed", NORM["gradient_clip_val"], SCALING)
    assert [step["scale"] for step in runs[0]["steps"]] == scales
    assert [name for name, value in runs[0]["parameters"].items() if not torch.equal(value, found[name])] == []
    # What is logged and clipped is the unscaled norm.
    assert all(0.05 < step["norm"] < 10 for step in runs[0]["steps"] if not step["skipped"])


@pytest.mark.matrix
def test_resume_with_the_scale(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {"precision": None, "plugins": [ShardPrecision("16-mixed", loss_scale=SCALING)]}

    names = ["shard_fsdp_aligned", "shard_ddp_aligned"]
    straight = run_distributed(test_resume._fit, 2, names[0], folder=str(tmp_path), **settings())
    resumed = run_distributed(test_resume._fit, 2, names[1], resume=str(tmp_path / "step=9.ckpt"), **settings())
    test_resume._assert_continues(straight, resumed, 9)
    # Another scale than a run begins with, or the comparison says nothing about it.
    assert resumed[0]["metrics"]["loss_scale"] < SCALING.initial / 4


class Sick(TinyLM):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * (torch.nan if self.global_rank == 1 else 1.0)


def _fit_sick(strategy: str) -> None:
    plugin = ShardPrecision("16-mixed", loss_scale=LossScaling(initial=4.0))
    quiet_trainer(strategy=strategy, plugins=[plugin], max_steps=9).fit(Sick(), loader())


def test_gradients_that_no_scale_mends_end_the_run_on_every_rank() -> None:
    with pytest.raises(DistributedError, match="smallest loss scale, 1, after 2 skipped steps") as error:
        run_distributed(_fit_sick, 2, "shard_fsdp")
    assert error.value.failed == {0: DataError.__name__, 1: DataError.__name__}


class Searching(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def _fit_searching() -> None:
    quiet_trainer(strategy="shard_ddp", plugins=[ShardPrecision("16-mixed")], max_steps=1).fit(Searching(), loader())


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused() -> None:
    with pytest.raises(DistributedError, match="LBFGS computes the loss again") as error:
        run_distributed(_fit_searching, 2)
    assert set(error.value.failed.values()) == {PrecisionError.__name__}
