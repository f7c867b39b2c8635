"""A checkpoint of a batch after which more is due: the validation and the epoch's end are not left out on resuming."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_shard import ShardFSDPStrategy
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

BATCHES = 4


class Telling(TinyLM):
    """Says what happens at which step; its learning rate follows the epochs, the validation loss or each step's."""

    def __init__(self, schedule: str, ends_at: int | None) -> None:
        super().__init__(dropout=0.1)
        self.schedule, self.ends_at = schedule, ends_at
        self.events: list[tuple[Any, ...]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        # Every validation that does not get better by far halves it.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        interval = "step" if self.schedule == "train_loss" else "epoch"
        settings = {"scheduler": plateau, "monitor": self.schedule, "interval": interval}
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_mean", loss.detach(), on_step=False, on_epoch=True)
        self.log("train_loss", loss.detach())
        return loss

    def on_train_epoch_start(self) -> None:
        self.events.append(("epoch starts", self.global_step))

    def on_validation_start(self) -> None:
        self.events.append(("validation", self.global_step))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.ends_at else None

    def on_train_epoch_end(self) -> None:
        self.events.append(("epoch ends", self.global_step, float(self.trainer.callback_metrics["train_mean"])))


def _fit(
    root: str, schedule: str, step: int | None, max_steps: int = 12, ends_at: int | None = None, **settings: Any
) -> tuple[list[tuple[Any, ...]], dict[str, Tensor], float, float]:
    torch.manual_seed(3)
    module = Telling(schedule, ends_at)
    saves = ModelCheckpoint(
        dirpath=root, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = quiet_trainer(
        strategy=ShardFSDPStrategy(),
        max_steps=max_steps,
        limit_train_batches=BATCHES,
        enable_checkpointing=True,
        callbacks=[saves],
        **settings,
    )
    trainer.fit(
        module,
        loader(),
        loader(count=16, shuffle=False),
        ckpt_path=None if step is None else f"{root}/step={step}.ckpt",
    )
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return module.events, whole_parameters(module), rate, float(trainer.callback_metrics["train_mean"])


def _straight_and_resumed(
    root: str, schedule: str, steps: list[int], stopped: bool, settings: dict[str, Any]
) -> list[Any]:
    runs = [_fit(f"{root}/0", schedule, None, **settings)]
    if stopped:
        # By max_steps, with the checkpoint's step as the last one.
        _fit(f"{root}/1", schedule, None, max_steps=steps[0], **settings)
    return [*runs, *(_fit(f"{root}/{int(stopped)}", schedule, step, **settings) for step in steps)]


@pytest.mark.parametrize(
    ("schedule", "stopped", "settings"),
    sampled(
        [
            ("epoch", False, {}),
            ("val_loss", False, {"val_check_interval": 2}),
            ("val_loss", True, {"val_check_interval": 2}),
            ("train_loss", False, {"val_check_interval": 2}),
            ("train_mean", False, {"limit_val_batches": 0}),
            ("epoch", False, {"ends_at": 3, "val_check_interval": 2}),
            ("epoch", False, {"check_val_every_n_epoch": 2, "accumulate_grad_batches": 2, "max_steps": 6}),
        ],
        2,
        5,
    ),
)
def test_what_follows_the_batch_of_a_save_is_not_left_out(
    tmp_path: Path, schedule: str, stopped: bool, settings: dict[str, Any]
) -> None:
    steps = [4] if stopped or schedule == "train_mean" else [2, 4]
    (runs,) = run_distributed(_straight_and_resumed, 1, str(tmp_path), schedule, steps, stopped, settings, timeout=120)
    events, parameters, rate, mean = runs[0]
    for step, (own, resumed, own_rate, own_mean) in zip(steps, runs[1:], strict=True):
        # The save comes first of all that happens at its step.
        rest = [event for event in events if event[1] >= step]
        if step * settings.get("accumulate_grad_batches", 1) % settings.get("ends_at", BATCHES):
            # The mean of the epoch in the middle of which it was saved begins again.
            at = [event[0] for event in rest].index("epoch ends")
            assert own[at] != rest[at]
            assert own[at][:2] == rest[at][:2]
            own, rest = own[:at] + own[at + 1 :], rest[:at] + rest[at + 1 :]
        assert own == rest, step
        assert (own_rate, own_mean) == (rate, mean), step
        for name, value in parameters.items():
            assert torch.equal(resumed[name], value), (step, name)


def _fit_with_saves_within(
    strategy: str, ckpt_path: str | None = None, **saves: Any
) -> tuple[dict[str, Tensor], list[Any], list[str]]:
    """Two epochs of 10 batches, 4 for a step, with a validation after 3, 6 and 9 of them."""
    torch.manual_seed(3)
    module, folder = TinyLM(dropout=0.1), saves.pop("dirpath", None)
    callbacks = [ModelCheckpoint(folder, "{step}", save_top_k=-1, **saves)] if folder else []
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "limit_train_batches": 10, "val_check_interval": 3}
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, callbacks=callbacks, enable_checkpointing=bool(folder), **settings
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), loader(count=16, shuffle=False), ckpt_path=ckpt_path)
    lacking = [str(warning.message) for warning in caught if "batches of one step" in str(warning.message)]
    return whole_parameters(module), module.seen, lacking


def _saves_within_and_resumed(strategy: str, root: str) -> list[Any]:
    triggers: list[dict[str, Any]] = [
        {"every_n_epochs": 1, "save_on_train_epoch_end": False},  # after each validation
        {"train_time_interval": timedelta(0)},
        {"every_n_train_steps": 1, "monitor": "val_loss", "save_on_train_epoch_end": False},
    ]
    runs = [_fit_with_saves_within(strategy, dirpath=f"{root}/{n}", **kind) for n, kind in enumerate(triggers)]
    # The first step of a fit that goes on takes no checkpoint of before it.
    runs += [_fit_with_saves_within(strategy, f"{root}/{n}/step=4.ckpt", dirpath=f"{root}/on/{n}") for n in range(2)]
    return [*runs, [sorted(path.name for path in Path(root, str(n)).iterdir()) for n in range(3)]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("shard_ddp", 1), pytest.param("shard_deepspeed_stage_2", 2, marks=pytest.mark.matrix)]
)
def test_saves_that_are_due_within_an_accumulation_come_after_its_step(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    for *runs, names in run_distributed(_saves_within_and_resumed, ranks, strategy, str(tmp_path)):
        assert not any(lacking for _, _, lacking in runs)
        # Steps come after 4, 8 and 10 batches; the first validation is after 3.
        assert names[1] == [f"step={step}.ckpt" for step in range(1, 7)]
        assert set(names[0]) >= {"step=1.ckpt", "step=2.ckpt", "step=4.ckpt"}
        (parameters, seen, _), *others = runs
        assert all(torch.equal(value, other[0][name]) for other in others for name, value in parameters.items())
        for _, rest, _ in runs[3:]:
            assert rest == seen[14:]


class Named(pl.LightningModule):
    """Parameters with slashes, blanks and words of checkpoints in their names, and one without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict({"in/out": torch.nn.Linear(2, 3)})
        self.own = torch.nn.ParameterDict({name: torch.ones(3) for name in ("a/b", "a b", "optimizer", "exp_avg")})
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.scale * (self.parts["in/out"](batch) * sum(self.own.values()) + torch.rand(())).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _resumed_twice(strategy: str) -> list[dict[str, Tensor]]:
    def fit(epochs: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        module, trainer = Named(), quiet_trainer(strategy=strategy, max_epochs=epochs)
        data = torch.randn(12, 2, generator=torch.Generator().manual_seed(5))
        trainer.fit(module, torch.utils.data.DataLoader(data, 2, shuffle=True), ckpt_path=ckpt_path)
        trainer.save_checkpoint(f"{epochs}.ckpt")
        return whole_parameters(module)

    whole = fit(3)
    fit(1)
    fit(2, "1.ckpt")
    return [whole, fit(3, "2.ckpt")]


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp"], 1))
def test_more_epochs_and_a_second_resume_with_odd_names(strategy: str) -> None:
    [(whole, resumed)] = run_distributed(_resumed_twice, 1, strategy)
    assert "own.a/b" in whole
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], value) for name, value in resumed.items())


class Counting(TinyLM):
    """Its loss depends on what its hooks have counted, and its schedule on how many steps there will be."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.register_buffer("counted", torch.zeros(()))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) * (1 + self.counted / 8)

    def on_train_batch_end(self, *batch: Any) -> None:
        self.counted += 1

    def on_validation_end(self) -> None:
        self.counted += 2

    def configure_optimizers(self) -> Any:
        optimizer, steps = torch.optim.AdamW(self.parameters()), int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _counted(root: str, ckpt_path: str | None = None) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    saves = {"by_steps": {"every_n_train_steps": 1}, "by_validations": {"every_n_epochs": 1}}
    callbacks = [ModelCheckpoint(f"{root}/{n}", "{step}", save_top_k=-1, **kind) for n, kind in saves.items()]
    callbacks = callbacks if ckpt_path is None else []
    trainer = quiet_trainer(
        strategy=ShardFSDPStrategy(), max_epochs=2, num_sanity_val_steps=0, val_check_interval=2,
        enable_checkpointing=ckpt_path is None, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module := Counting(), loader(count=16), loader(count=4, shuffle=False), ckpt_path=ckpt_path)
    return module.seen, module.losses


def _counted_and_resumed(root: str) -> list[Any]:
    saved = ["by_steps/step=1", "by_validations/step=2"]
    return [_counted(root), *(_counted(f"{root}/on", f"{root}/{path}.ckpt") for path in saved)]


def test_a_save_has_what_the_modules_own_hooks_do(tmp_path: Path) -> None:
    """Lightning calls callbacks before them, and makes the loaders early where the number of steps is asked for."""
    ((seen, losses), *resumed), *_ = run_distributed(_counted_and_resumed, 1, str(tmp_path))
    assert len(seen) == 8
    for (own_seen, own_losses), step in zip(resumed, (1, 2), strict=True):
        assert own_seen == seen[step:]
        assert own_losses == losses[step:]
