"""Losses and gradients of inf and NaN: the run ends, the step is skipped, or the fit goes back, on all ranks alike."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard import ConfigurationError, DataError, EMACallback, ShardPrecision, full_tensor
from lightning_shard.engines.memory_breakdown import Resident
from lightning_shard.registry import build
from lightning_shard.run.nonfinite import warn_of_nonfinite
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

ENGINES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2_offload", "deepspeed_stage_3"]


class Model(pl.LightningModule):
    """Its loss is NaN, or one of its gradients alone, on the last rank in one of its batches."""

    def __init__(self, bad_batch: int | None, kind: str = "loss", times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad_batch, self.kind, self.times = bad_batch, kind, times
        self.first = nn.Linear(4, 8)
        self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))
        self.seen: list[tuple[int, int]] = []
        self.values: dict[int, dict[str, Tensor | None]] = {}
        self.rates: list[float] = []
        self.scales: list[float | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((batch_idx, self.global_step))
        x = self.first(batch)
        after = self.bad_batch is not None and self.bad_batch <= batch_idx < self.bad_batch + self.times
        bad = after and self.global_rank == self.trainer.world_size - 1
        if bad and self.kind == "loss":
            x = x * math.nan
        x = self.second(x.tanh())
        if bad and self.kind == "gradient":
            # The value is 0; the gradient 0 * inf.
            return x.square().mean() + (x.detach() - x).square().sum().sqrt()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.values[batch_idx] = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.scales.append(self.trainer.precision_plugin.loss_scale)  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        self.values[-1] = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}


def _fit(
    name: str,
    module: Model,
    nonfinite: Any,
    *,
    steps: int,
    folder: Path | None = None,
    every: int = 2,
    callbacks: Sequence[pl.Callback] = (),
    **settings: Any,
) -> Any:
    pl.seed_everything(3, verbose=False)
    data = torch.randn(64, 4)
    saves = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)]
    trainer = quiet_trainer(
        strategy=build(f"shard_{name}", nonfinite=nonfinite),
        max_steps=steps,
        callbacks=[*callbacks, *saves],
        enable_checkpointing=folder is not None,
        **settings,
    )
    trainer.fit(module, DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)))
    return trainer


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _skips(names: list[str], kind: str) -> list[Any]:
    found = []
    for name in names:
        module = Model(2, kind)
        trainer = _fit(name, module, "skip", steps=4)
        stays = _same(module.values[2], module.values[3])
        moves = not _same(module.values[3], module.values[-1])
        count = float(trainer.callback_metrics["nonfinite_steps"])
        found.append((stays, moves, count, trainer.global_step, [round(rate, 4) for rate in module.rates]))
    return found


@pytest.mark.parametrize("kind", sampled(["loss", "gradient"], 1))
def test_the_step_is_skipped(kind: str) -> None:
    expected = (True, True, 1.0, 4, [0.1, 0.09, 0.081, 0.081])
    assert run_distributed(_skips, 2, ENGINES, kind) == [[expected] * len(ENGINES)] * 2


def _ends(name: str, nonfinite: Any, steps: int, folder: Path, times: int = 1) -> Any:
    module = Model(2, times=times)
    try:
        _fit(name, module, nonfinite, steps=steps, folder=folder, every=1)
    except DataError as error:
        return str(error), [index for index, _ in module.seen], sorted(p.name for p in folder.iterdir())
    return None


@pytest.mark.parametrize(("name", "steps"), sampled([("fsdp", 3), ("ddp", 3), ("deepspeed_stage_3", 6)], 0))
def test_the_run_ends_before_anything_is_saved(name: str, steps: int, tmp_path: Path) -> None:
    """Also where the step is the last."""
    for text, batches, saved in run_distributed(_ends, 2, name, "raise", steps, tmp_path):
        assert "In step 3 the loss is inf or NaN on 1 of 2 ranks." in text
        assert batches == [0, 1, 2]
        assert saved == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


@pytest.mark.parametrize(
    ("kind", "place"), sampled([("loss", "rank 1: the output of second.0"), ("gradient", "gradient of")], 0)
)
def test_the_module_is_named(kind: str, place: str) -> None:
    assert all(place in text for text in run_distributed(_named, 2, kind))


def _named(kind: str) -> str:
    module = Model(1, kind)
    module.frozen = nn.Parameter(torch.ones(1), requires_grad=False)  # ahead of the others, without a gradient
    with pytest.raises(DataError) as raised:
        _fit("fsdp", module, {"action": "raise", "find_module": True}, steps=4)
    return str(raised.value)


def test_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    text, batches, _ = run_distributed(_ends, 2, "fsdp", {"action": "skip", "limit": 2}, 8, tmp_path, times=9)[0]
    assert "It is the 3th time in a row, more than nonfinite.limit = 2" in text
    assert batches == [0, 1, 2, 3, 4]


def _goes_on_as_if_resumed(name: str, folder: Path) -> tuple[bool, bool]:
    """What a fit that went back does next is what a fit does that resumes from that checkpoint with that batch."""
    went_back = Model(2)
    _fit(name, went_back, "rollback", steps=4, folder=folder, callbacks=[EMACallback(decay=0.5)])
    plain = Model(None)
    # The module has the averages at the end of the fit.
    trainer = quiet_trainer(strategy=build(f"shard_{name}"), max_steps=4, callbacks=[EMACallback(decay=0.5)])
    pl.seed_everything(3, verbose=False)
    data = torch.randn(64, 4)
    later: Any = torch.cat([data[:8], data[12:]])  # without the batch of the step that was left out
    trainer.fit(plain, DataLoader(later, 2, sampler=DistributedSampler(later, shuffle=False)))
    return _same(went_back.values[-1], plain.values[-1]), _same(went_back.values[3], plain.values[-1])


@pytest.mark.parametrize(
    "name", sampled(["ddp", "fsdp_aligned", "deepspeed_stage_2", "deepspeed_stage_3_offload_aligned"], 1)
)
def test_a_fit_that_went_back_is_one_without_that_batch(name: str, tmp_path: Path) -> None:
    """With its optimizer state, schedule, dropout and average of weights."""
    assert run_distributed(_goes_on_as_if_resumed, 2, name, tmp_path) == [(True, False)] * 2


def test_going_back_ends(tmp_path: Path) -> None:
    config = {"action": "rollback", "limit": 1}
    text, batches, _ = run_distributed(_ends, 2, "ddp", config, 8, tmp_path, times=3)[0]
    assert "It is the 2th time in all" in text
    assert batches == [0, 1, 2, 3]


def _fp16() -> Any:
    found = []
    for name in ("fsdp", "deepspeed_stage_2"):
        module = Model(2)
        trainer = _fit(name, module, "skip", steps=4, plugins=[ShardPrecision("16-mixed")])
        found.append((_same(module.values[2], module.values[3]), trainer.precision_plugin.loss_scale))
    return found


def test_a_loss_of_nan_is_no_overflow() -> None:
    """The loss scale stays."""
    assert run_distributed(_fp16, 2)[0] == [(True, 2.0**16)] * 2


@pytest.mark.parametrize("wrong", ["stop", {"action": "skip", "limit": -1}])
def test_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="nonfinite"):
        build("shard_ddp", nonfinite=wrong)


def test_weights_that_are_quantised_are_not_looked_at_after_training() -> None:
    kinds = (torch.int8, torch.float8_e4m3fn, torch.float32)
    resident = [Resident("parameters", "device", torch.ones(3).to(kind)) for kind in kinds]
    engine: Any = SimpleNamespace(memory_breakdown=lambda: resident)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_nonfinite(engine)
    resident[2].tensor[0] = math.inf  # type: ignore[index]
    with pytest.warns(UserWarning, match="There is inf or NaN in the weights"):
        warn_of_nonfinite(engine)
