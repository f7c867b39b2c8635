"""A checkpoint that is saved among the batches of one step: what resumes from it takes the same steps, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_shard import ShardPrecision
from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.checkpoint.gradients import stored_gradients
from lightning_shard.checkpoint.inspect import describe, open_any, verify
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.tools import convert
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES, OFFLOADED, ZERO, differences, relative

SAVED, STEPS, EVERY = 10, 4, 4  # After two batches of the third step.
BOUNDARY = {"accumulate_sync": "boundary"}


# Engines that reduce once a step by themselves.
UNREDUCED = ("ddp_plain", "zero_1", "zero_1_offload")


class Saves(pl.Callback):
    """Saves after batch `SAVED`, as no ModelCheckpoint does, or in its backward pass."""

    def __init__(self, path: str, inside: bool, after: int = SAVED) -> None:
        self.path, self.inside, self.after = path, inside, after

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after and not self.inside:
            trainer.save_checkpoint(self.path)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after and self.inside:
            trainer.save_checkpoint(self.path)


class Weighted(TinyLM):
    """Losses with a weight: the tokens of a batch that they are the mean over."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        (tokens, targets), counts = batch, batch[0] > 5
        return {"loss": cross_entropy(self(tokens)[counts], targets[counts]), "weight": counts.sum()}


class Unused(TinyLM):
    """Uses its ``shift`` in the first batch of every step alone, whose gradient is there when it is saved."""

    def forward(self, tokens: Tensor) -> Tensor:
        used = self.trainer.fit_loop.batch_idx % EVERY == 0
        x = self.embed(tokens) * self.frozen + (self.shift if used else 0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Running(TinyLM):
    """Weighs its loss by a mean over batches, of which each rank has its own within a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.mean.mul_(0.5).add_(batch[0].float().mean())
        return super().training_step(batch, batch_idx) * self.mean


class Freezes(TinyLM):
    """Freezes a part where a run begins, so that DDP is built anew."""

    def on_train_start(self) -> None:
        self.blocks[0].requires_grad_(False)


class OnHost(TinyLM):
    """With 16-bit masters, which DeepSpeed's own optimizer steps alone where they are offloaded."""

    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        trained = [p for p in self.parameters() if p.requires_grad]
        return DeepSpeedCPUAdam(trained, lr=1e-2, fp32_optimizer_states=False)


def fit(
    strategy: str,
    *,
    saves: str | None = None,
    inside: bool = False,
    resume: str | None = None,
    precision: str = "32-true",
    module: type[TinyLM] = TinyLM,
    options: Mapping[str, Any] | None = None,
    dropout: float = 0.1,
    callbacks: Sequence[pl.Callback] = (),
    **settings: Any,
) -> tuple[dict[str, Tensor], list[str]]:
    """Some steps; whole parameters and optimizer state, and what was said of gradients."""
    torch.manual_seed(3)
    final = Final()
    fp16 = precision.startswith("16")
    given: dict[str, Any] = {"plugins": ShardPrecision(precision)} if fp16 else {"precision": precision}  # type: ignore[arg-type]
    trainer = quiet_trainer(
        strategy=ENGINES[strategy](**{"aligned": True, **(options or {})}),
        **{"max_steps": STEPS, "accumulate_grad_batches": EVERY, **given, **settings},
        callbacks=[final, *([Saves(saves, inside)] if saves else []), *callbacks],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module(dropout=dropout), loader(), ckpt_path=resume)
    said = [str(warning.message) for warning in caught if "accumulates" in str(warning.message)]
    return {**final.parameters, **final.optimizer}, said


def straight_and_resumed(root: str, runs: list[dict[str, Any]]) -> list[Any]:
    paths = [f"{root}/{number}.ckpt" for number in range(len(runs))]
    return [(fit(saves=path, **run), fit(resume=path, **run)) for path, run in zip(paths, runs, strict=True)]


def check(tmp_path: Path, runs: list[dict[str, Any]], *, ranks: int = 2) -> None:
    for rank in run_distributed(straight_and_resumed, ranks, str(tmp_path), runs, timeout=400):
        for run, ((straight, said), (resumed, warned)) in zip(runs, rank, strict=True):
            assert not said + warned, run
            assert not differences(straight, resumed), run
    for number, run in enumerate(runs):
        path = tmp_path / f"{number}.ckpt"
        manifest = read_manifest(path)
        unreduced = "accumulate_sync" in run.get("options", {}) or run["strategy"] in UNREDUCED
        keys = [f"rank_gradient.{rank}.head.weight" for rank in range(ranks)] if unreduced else ["gradient.head.weight"]
        assert set(keys) == {key for key in manifest.tensors if "gradient" in key and key.endswith("head.weight")}, run
        verify(path)


def test_what_is_saved_within_a_step_goes_on_bit_by_bit(tmp_path: Path) -> None:
    boundary = {"strategy": "full", "precision": "16-mixed", "module": Weighted, "options": BOUNDARY}
    # Epochs of 8 batches, the save after the second of the second.
    scheduled = {"callbacks": [GradientAccumulationScheduler({0: 2, 1: EVERY})], "accumulate_grad_batches": 1}
    by_epoch = {"strategy": "full", "limit_train_batches": 8, "max_steps": 6, **scheduled}
    stateful = {"strategy": "zero_2", "options": {"async_save": True}, "module": Running}
    check(tmp_path, [boundary, stateful, by_epoch, {"strategy": "ddp", "module": Freezes}])


FP32, BF16, FP16 = ({"precision": p} for p in ("32-true", "bf16-mixed", "16-mixed"))


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "ddp_plain", "full", "hybrid_1x2", "hybrid_2x1", "hybrid_2x2", "offload"])
def test_every_engine_of_torch(tmp_path: Path, strategy: str) -> None:
    both = [{"strategy": strategy, **FP32}, {"strategy": strategy, **BF16}]
    boundary = [{**run, "options": BOUNDARY} for run in both]
    weighted = {"strategy": strategy, **FP16, "module": Weighted, "options": BOUNDARY}
    check(tmp_path, [*both, *boundary, weighted], ranks=4 if strategy == "hybrid_2x2" else 2)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp_plain", "full", "offload", "zero_1", "zero_2", "zero_3", *OFFLOADED])
def test_low_memory(tmp_path: Path, strategy: str) -> None:
    kind = OnHost if strategy in OFFLOADED else TinyLM
    check(tmp_path, [{"strategy": strategy, "precision": "bf16-true", "module": kind, "options": {"aligned": False}}])


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", [name for name in ZERO if name != "zero_3_hpz"])
def test_every_stage_of_deepspeed(tmp_path: Path, strategy: str) -> None:
    precisions = [FP32, BF16, FP16]
    runs = [{"strategy": strategy, **precision} for precision in precisions]
    check(tmp_path, [*runs, {"strategy": strategy, **precisions[-1], "module": Weighted}], ranks=2)


@pytest.mark.matrix
def test_what_only_the_saved_part_of_a_step_used_is_stepped(tmp_path: Path) -> None:
    unused = {"find_unused_parameters": True}
    check(
        tmp_path,
        [
            {"strategy": "ddp", "module": Unused, "options": unused},
            {"strategy": "ddp", **BF16, "module": Unused, "options": {**unused, **BOUNDARY}},
            {"strategy": "full", "module": Unused, "options": {**unused, **BOUNDARY}},
            {"strategy": "full", **BF16, "module": Unused, "options": unused},
            *({"strategy": name, "module": Unused} for name in ("zero_1", "zero_2", "zero_3")),
        ],
    )


# With another engine, on other ranks, in other forms


def save(path: str, run: dict[str, Any]) -> dict[str, Tensor]:
    return fit(saves=path, **run)[0]


def resume(path: str, runs: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], list[str]]]:
    return [fit(resume=path, **run) for run in runs]


def check_close(tmp_path: Path, saved: dict[str, Any], runs: list[dict[str, Any]], *, ranks: int = 2) -> None:
    path = str(tmp_path / "a.ckpt")
    straight = run_distributed(save, 2, path, saved, timeout=200)[0]
    for run, (resumed, said) in zip(runs, run_distributed(resume, ranks, path, runs, timeout=400)[0], strict=True):
        assert not said, run
        # In another order of fp32 sums, after Adam's steps; without the gradients it is 0.05 and more.
        assert relative(straight, resumed) < 1e-3, run


@pytest.mark.parametrize("writer", ["zero_1", pytest.param("full", marks=pytest.mark.matrix)])
def test_another_engine_takes_the_same_step(tmp_path: Path, writer: str) -> None:
    readers: list[dict[str, Any]] = [{"strategy": "full"}, {"strategy": "ddp", "options": BOUNDARY}]
    check_close(tmp_path, {"strategy": writer}, [*readers, {"strategy": "zero_2"}])


@pytest.mark.matrix
@pytest.mark.parametrize("writer", ["zero_1", "full"])
@pytest.mark.parametrize("module", [TinyLM, Weighted])
def test_one_rank_takes_the_same_step_with_twice_the_batches(tmp_path: Path, writer: str, module: type[TinyLM]) -> None:
    # A rank draws other random numbers.
    given: dict[str, Any] = {"module": module, "dropout": 0.0}
    runs = [{"strategy": name, **given, "accumulate_grad_batches": 2 * EVERY} for name in ("ddp", "zero_3")]
    check_close(tmp_path, {"strategy": writer, **given}, runs, ranks=1)


def _said(root: str) -> list[list[str]]:
    path = f"{root}/whole.ckpt"
    convert_to = f"{root}/file.ckpt"
    whole = fit("ddp", saves=path)[1]
    convert(path, convert_to)
    early = LambdaCallback(on_train_start=lambda trainer, _: trainer.save_checkpoint(f"{root}/early.ckpt"))
    return [
        whole,
        fit("ddp", resume=path, module=Freezes, callbacks=[early])[1],
        fit("ddp", resume=f"{root}/early.ckpt")[1],
        fit("ddp", saves=f"{root}/inside.ckpt", inside=True)[1],
        fit("ddp", saves=f"{root}/a.full.ckpt")[1],
        fit("ddp", resume=f"{root}/inside.ckpt")[1],
        fit("ddp", resume=convert_to)[1],
        fit("ddp", resume=path, accumulate_grad_batches=3)[1],
    ]


def test_what_has_no_gradients_says_so(tmp_path: Path) -> None:
    (said,) = run_distributed(_said, 1, str(tmp_path))
    (), (), (of_early,), (inside,), (full,), (of_inside,), (converted,), (other,) = said
    assert inside.startswith(
        "This checkpoint is saved inside of a batch, which runs again on resuming, after 1 of the 4"
    )
    assert full.startswith("This checkpoint is saved in a form that has none, after 2 of the 4 batches")
    assert "lacks their gradients, because it has none" in of_early  # saved ahead of their loading
    assert "lacks their gradients, because it has none" in of_inside
    assert "lacks their gradients, because it has none" in converted
    assert "had taken 8 samples (1 ranks x batch size 4 x accumulate_grad_batches 4), here 4 (1 ranks" in other
    path = tmp_path / "whole.ckpt"
    assert "21 gradients of a step so far" in describe(path, open_any(path))
    assert not any("gradient" in key for key in open_any(tmp_path / "file.ckpt").tensors)
    assert not any("gradient" in key for key in open_any(path, optimizers="none").tensors)


class Manual(TinyLM):
    """Steps after every second batch by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def _manual(path: str, saved: int) -> int:
    """How often a save after so many batches was warned of."""
    trainer = quiet_trainer(strategy="shard_ddp", max_steps=5, callbacks=[Saves(path, inside=False, after=saved)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Manual(), loader(count=40))
    return sum("after a manual_backward that no optimizer step" in str(each.message) for each in caught)


@pytest.mark.parametrize(("saved", "warned"), [(10, 0), (9, 1)])
def test_manual_steps_that_are_not_complete_are_warned_of(tmp_path: Path, saved: int, warned: int) -> None:
    assert run_distributed(_manual, 1, str(tmp_path / "a.ckpt"), saved) == [warned]


def test_keys_that_are_no_ranks() -> None:
    keys = ["gradient.0.weight", "rank_gradient.1.0.weight", "rank_gradient.0.a", "model.gradient.a"]
    found = {"0.weight": {None: keys[0], 1: keys[1]}, "a": {0: keys[2]}}
    assert stored_gradients(keys) == found
    for key in ("rank_gradient.x.a", "rank_gradient.1", "rank_gradient..a"):
        with pytest.raises(CheckpointCorruptError, match="is the gradient of no rank"):
            stored_gradients([key])
