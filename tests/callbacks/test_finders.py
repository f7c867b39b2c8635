"""Finders of a learning rate and a batch size: every engine runs them, and is afterwards as it was."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_shard import ConfigurationError
from lightning_shard.callbacks import BatchSizeCallback
from tests.harness import run_distributed
from tests.models import Final, TinyLM, Tokens, quiet_trainer

MORE = ["ddp", "fsdp", "fsdp_hybrid", "fsdp_offload", "deepspeed_stage_2", "deepspeed_stage_3"]
_IN_MATRIX = [pytest.param(f"shard_{name}_aligned", marks=pytest.mark.matrix) for name in MORE]
ALL = ["shard_deepspeed_stage_1_aligned", *_IN_MATRIX]
MB = 2**20


class Data(TinyLM):
    """With its own loader, dropout, and an optimizer that is given the frozen parameter too."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(dropout=0.1)
        self.batch_size, self.learning_rate = batch_size, 1e-2

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(count=512), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def outcome(module: Data, final: Final) -> dict[str, Any]:
    return {
        "losses": module.losses,
        "seen": module.seen,
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "random": torch.get_rng_state(),
        "left": sorted(path.name for path in Path.cwd().iterdir()),
    }


def fit(strategy: str, precision: str, *, batch_size: int = 4, **settings: Any) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = Data(batch_size), Final()
    settings.setdefault("callbacks", []).append(final)
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=5, **settings)
    trainer.fit(module)
    return outcome(module, final)


def tuned(strategy: str, precision: str) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = Data(), Final()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=5, callbacks=[final])
    with warnings.catch_warnings():  # of the finder's own checkpoint
        warnings.filterwarnings("error", message="The checkpoint's hyperparameters win")
        Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.1, num_training=12, early_stop_threshold=None)
    assert len(module.losses) == 12
    module.losses, module.seen, module.learning_rate = [], [], 1e-2
    trainer.fit(module)
    return outcome(module, final)


class Saves(ModelCheckpoint):
    """In each second step; the steps that its hook is called in."""

    def __init__(self, folder: str) -> None:
        super().__init__(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def found(
    strategy: str,
    precision: str,
    *,
    start: int = 4,
    steps: int = 5,
    folder: str = "",
    resume: str | None = None,
    limits: tuple[int, int] | None = None,
    has_lock: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    if limits is not None:
        arguments["limit"] = limits[dist.get_rank()]
    module, final, finder = Data(start), Final(), BatchSizeCallback(**arguments)
    if has_lock:
        module.lock = threading.Lock()
    saving = Saves(folder)
    trainer = quiet_trainer(
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        accumulate_grad_batches=2,
        callbacks=[finder, final, *([saving] if folder else [])],
        enable_checkpointing=bool(folder),
    )
    trainer.fit(module, ckpt_path=resume)
    trials = len(module.losses) - trainer.accumulate_grad_batches * (steps - (2 if resume else 0))
    module.losses, module.seen = module.losses[trials:], module.seen[trials:]
    own = {"found": module.batch_size, "accumulate": trainer.accumulate_grad_batches}
    return {**outcome(module, final), **own, "measured": finder.measured, "trials": trials, "saves": saving.steps}


def assert_same(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        for name in ("losses", "seen"):
            assert one[name] == other[name], name
        for name in ("parameters", "optimizer"):
            assert one[name].keys() == other[name].keys()
            assert [n for n in one[name] if not torch.equal(one[name][n], other[name][n])] == []
        assert torch.equal(one["random"], other["random"])
        assert one["left"] == other["left"] == []


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ALL)
def test_the_tuner_finds_a_learning_rate_and_leaves_the_fit_as_it_was(strategy: str) -> None:
    plain, after = (run_distributed(run, 2, strategy, "32-true") for run in (fit, tuned))
    assert plain[0]["seen"] != plain[1]["seen"]
    assert_same(plain, after)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ALL)
def test_a_batch_size_is_found_and_the_fit_is_one_with_it(strategy: str) -> None:
    runs = run_distributed(found, 2, strategy, "32-true", limits=(4 * MB, MB))
    size, measured = runs[0]["found"], runs[0]["measured"]
    assert {run["found"] for run in runs} == {size}, "ranks do not agree"
    first, second, _ = measured
    assert second == 2 * first
    # A quarter of what the plan says, which is never far off.
    assert size / 8 < first < size / 2
    assert 16 < size < 256
    # What a step with that size really takes is within the limit, and one with a tenth more is not within its share.
    sized = run_distributed(found, 2, strategy, "32-true", limit=MB, start=size, has_lock=True)
    [real] = {run["measured"][size] for run in sized}
    assert 0.85 * MB < real <= 0.9 * MB
    assert_same(run_distributed(fit, 2, strategy, "32-true", batch_size=size, accumulate_grad_batches=2), runs)


@pytest.mark.matrix
def test_the_global_batch_is_kept_and_a_resumed_fit_goes_on(tmp_path: Path) -> None:
    strategy, settings = "shard_fsdp_aligned", {"limit": MB, "start": 24, "keep_global_batch": True, "has_lock": True}
    runs = run_distributed(found, 2, strategy, "bf16-mixed", folder=str(tmp_path), **settings)
    # 48 samples a step, in more than half of them at once, but not in all.
    assert {(run["found"], run["accumulate"]) for run in runs} == {(48, 1)}
    # What can't be copied can't be planned.
    assert list(runs[0]["measured"])[:2] == [24, 48]
    # It would find another one.
    settings["limit"] = MB // 4
    rest = run_distributed(found, 2, strategy, "bf16-mixed", resume=str(tmp_path / "step=2.ckpt"), **settings)
    for whole, part in zip(runs, rest, strict=True):
        assert (part["found"], part["accumulate"]) == (48, 1)
        assert whole["saves"] == [2, 4], "a trial is none of the fit's checkpoints"
        assert part["losses"] == whole["losses"][2:]


def _refused(case: str) -> str:
    arguments = {"limit": 1000} if case == "small" else {} if case == "no limit" else {"limit": MB}
    module = TinyLM() if case == "no attribute" else Data()
    module.automatic_optimization = case != "manual"
    trainer = quiet_trainer(strategy="shard_fsdp", max_steps=1, callbacks=[BatchSizeCallback(**arguments)])
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(module, DataLoader(Tokens(), batch_size=2) if case == "no attribute" else None)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("small", "Not a batch of 1 fits: one of 1 takes"),
        ("no limit", "limit is not set, but a CPU has no memory of its own"),
        ("no attribute", "BatchSizeCallback sets 'batch_size', which neither module"),
        ("manual", "can't measure steps of manual optimization"),
    ],
)
def test_what_can_not_be_searched_is_refused(case: str, message: str) -> None:
    for text in run_distributed(_refused, 2, case):
        assert message in text
