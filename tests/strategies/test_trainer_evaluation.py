"""Validation, test and prediction, and samplers: every sample counts, on every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader, rank_zero
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters
from tests.strategies.indexed import (
    ALL,
    BOTH,
    COUNT,
    PRECISIONS,
    ROUNDING,
    Indexed,
    build,
    data,
    flat,
    refusal,
    samples,
)

# Evaluation


def _evaluate(strategy: str, precision: str) -> dict[str, Any]:
    """Loops without a fit, then around one, on the same module."""
    module = build()
    x = samples().tensors[1]
    # The whole data set on one process, with whole parameters.
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    expected_module = build().to(dtype)
    with torch.no_grad():
        predicted = expected_module(x.to(dtype)).float()
        expected = (predicted - x.sum(-1)).square().mean().item()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, num_sanity_val_steps=0)
    validated = trainer.validate(module, data(), verbose=False)
    tested = trainer.test(module, data(), verbose=False)
    parts = trainer.predict(module, data())
    trainer.fit(module, data(), data())
    after_fit = trainer.callback_metrics["val_loss"].item()
    again = trainer.validate(module, data(), verbose=False)
    indices = torch.cat([i for i, _ in parts])
    outputs = torch.cat([o for _, o in parts]).float()
    return {
        "expected": expected,
        "val": validated[0]["val_loss"],
        "test": tested[0]["test_loss"],
        "predict": (indices.tolist(), (outputs - predicted[indices]).abs().max().item(), outputs.requires_grad),
        "fit": (after_fit, again[0]["val_loss"]),
        "modes": module.modes,
    }


@ALL
def test_validate_test_and_predict_with_and_without_fit(strategy: str, precision: str) -> None:
    one, other = run_distributed(_evaluate, 2, strategy, precision)
    for rank in (one, other):
        assert rank["val"] == pytest.approx(rank["expected"], rel=ROUNDING[precision])
        assert rank["test"] == rank["val"]
        assert rank["predict"][1] < ROUNDING[precision]
        assert not rank["predict"][2]
        assert rank["fit"][0] == rank["fit"][1] != rank["val"]
        assert rank["modes"] == {
            "train": {(True, False)},
            **{stage: {(False, False)} for stage in ("val", "test", "predict")},
        }
    assert one["val"] == other["val"]
    assert sorted(one["predict"][0] + other["predict"][0]) == list(range(COUNT))


def _several_loaders(strategy: str) -> dict[str, Any]:
    module = build()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, data(), [data(), data(count=8)])
    metrics = dict(trainer.callback_metrics)
    predictions = trainer.predict(module, [data(), data(count=6)])
    return {
        "metrics": {k: v.item() for k, v in metrics.items()},
        "predicted": [flat([i.tolist() for i, _ in part]) for part in predictions],
    }


@BOTH
def test_several_evaluation_loaders(strategy: str) -> None:
    one, other = run_distributed(_several_loaders, 2, strategy)
    assert one["metrics"] == other["metrics"]
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= one["metrics"].keys()
    assert sorted(one["predicted"][0] + other["predicted"][0]) == list(range(COUNT))
    assert sorted(one["predicted"][1] + other["predicted"][1]) == list(range(6))


class TwoSources(Indexed):
    def loss(self, batch: Any, stage: str) -> Tensor:
        if stage != "train":
            return super().loss(batch, stage)
        losses = [super(TwoSources, self).loss(part, stage) for part in batch.values() if part is not None]
        return torch.stack(losses).sum()


def _combined(strategy: str, mode: str) -> tuple[int, list[list[int]]]:
    pl.seed_everything(1, verbose=False)
    module = TwoSources()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module, CombinedLoader({"a": data(), "b": data(count=8)}, mode))
    return trainer.global_step, module.seen["train"]


@BOTH
def test_combined_loader(strategy: str) -> None:
    for mode, steps in (("min_size", 2), ("max_size_cycle", 6), ("max_size", 6)):
        (one_steps, one), (other_steps, other) = run_distributed(_combined, 2, strategy, mode)
        assert one_steps == other_steps == steps
        # Each loader got its own distributed sampler: in no step the ranks share a sample of the same loader.
        assert all(not set(a) & set(b) for a, b in zip(one, other, strict=True))


# Samplers


class EveryThird(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(0, COUNT, 3))

    def __len__(self) -> int:
        return COUNT // 3


class OwnBatches(BatchSampler):
    """A user's batch sampler with the constructor that Lightning asks for."""

    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)


def _sampled(strategy: str, kind: str) -> list[list[int]]:
    module, flags = build(), {}
    if kind == "own":
        loader = DataLoader(samples(), batch_size=2, sampler=EveryThird())
    elif kind == "replacement":
        loader = DataLoader(samples(), batch_size=2, sampler=RandomSampler(samples(), replacement=True, num_samples=8))
    elif kind in ("stock batches", "own batches"):
        batches = OwnBatches if kind == "own batches" else BatchSampler
        loader = DataLoader(samples(), batch_sampler=batches(SequentialSampler(range(COUNT)), 2, False))
    elif kind == "shuffled batches":
        loader = DataLoader(samples(), batch_sampler=OwnBatches(RandomSampler(range(COUNT))))
    elif kind == "distributed":
        sampler = torch.utils.data.DistributedSampler(samples(), shuffle=False)
        loader = DataLoader(samples(), batch_size=3, sampler=sampler)
    else:
        loader = data(shuffle=kind == "shuffled")
        flags = {"use_distributed_sampler": kind != "off"}
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, **flags)
    trainer.fit(module, loader)
    assert isinstance(trainer.train_dataloader.batch_sampler, OwnBatches) == (
        kind in ("own batches", "shuffled batches")
    )
    return module.seen["train"]


def _all_sampled(strategy: str, kinds: list[str]) -> dict[str, list[list[int]]]:
    return {kind: _sampled(strategy, kind) for kind in kinds}


OWN = ("own batches", "shuffled batches")
ORDERED = ["plain", "own", "stock batches", "own batches"]


@BOTH
def test_training_keeps_the_order_of_the_loader(strategy: str) -> None:
    kinds = [*ORDERED, "shuffled", "shuffled batches", "replacement", "distributed", "off"]
    one, other = run_distributed(_all_sampled, 2, strategy, kinds)
    everything = list(range(COUNT))
    for kind in ORDERED:
        order = everything[::3] if kind == "own" else everything
        assert one[kind] == [order[i : i + 4 : 2] for i in range(0, len(order), 4)], kind
        assert other[kind] == [order[i + 1 : i + 4 : 2] for i in range(0, len(order), 4)], kind
    for kind in ("shuffled", "shuffled batches"):
        both = flat(one[kind]) + flat(other[kind])
        assert sorted(both) == everything != both, kind
    assert len(flat(one["replacement"]) + flat(other["replacement"])) == 8
    assert (one["distributed"][0], other["distributed"][0]) == ([0, 2, 4], [1, 3, 5])
    assert one["off"] == other["off"]
    assert flat(one["off"]) == everything


def _said(strategy: str, kind: str) -> tuple[list[list[int]], int]:
    """What one process sees in two epochs, and how often it is said that the order is kept."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(rank_zero.__name__)
    logger.addHandler(handler)
    module = build()
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, data(shuffle=kind == "shuffled"))
    logger.removeHandler(handler)
    return module.seen["train"], sum("order of the training dataloader is kept" in message for message in messages)


def test_one_process_keeps_the_order_and_says_so_once() -> None:
    everything = list(range(COUNT))
    [(seen, said)] = run_distributed(_said, 1, "shard_ddp", "plain")
    assert (flat(seen), said) == (everything * 2, 1)
    [(seen, said)] = run_distributed(_said, 1, "shard_ddp", "shuffled")
    assert said == 0
    assert sorted(flat(seen)) == sorted(everything * 2) != flat(seen)


# Prediction


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder
        self.written: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.written.append((prediction[0].tolist(), list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save(predictions, self.folder / f"rank-{trainer.global_rank}.pt")


def _predict(strategy: str, precision: str, counts: list[int]) -> list[Any]:
    results = []
    for count in counts:
        module, writer = build(), Writer(Path.cwd())
        trainer = quiet_trainer(strategy=strategy, precision=precision, callbacks=[writer])
        trainer.predict(module, data(batch_size=2, count=count), return_predictions=False)
        dist.barrier()
        saved = [part for rank in range(2) for part in torch.load(f"rank-{rank}.pt")]
        found = torch.cat([index for index, _ in saved]), torch.cat([output for _, output in saved])
        dist.barrier()
        order = found[0].argsort()
        results.append({"written": writer.written, "index": found[0][order].tolist(), "output": found[1][order]})
    return results


@ALL
def test_prediction_covers_every_sample_once_where_ranks_have_unequal_numbers(strategy: str, precision: str) -> None:
    # 24: equal; 23: a smaller last batch on rank 1; 21: rank 1 has one batch less.
    counts = [24, 23, 21]
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    for rank in run_distributed(_predict, 2, strategy, precision, counts):
        for count, result in zip(counts, rank, strict=True):
            assert result["index"] == list(range(count))
            assert all(seen == said for seen, said in result["written"])
            with torch.no_grad():
                # What modules return is fp32, whatever they compute in.
                expected = build().to(dtype)(samples(count).tensors[1].to(dtype)).float()
            rounding = ROUNDING[precision]
            torch.testing.assert_close(result["output"], expected, rtol=rounding, atol=rounding)


def _predict_nothing_on_one(strategy: str) -> None:
    mine = DataLoader(torch.utils.data.Subset(samples(), range(3 * (1 - dist.get_rank()))))
    module = build()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False)
    trainer.predict(module, mine)


@BOTH
def test_prediction_where_a_rank_has_no_batch(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _predict_nothing_on_one, strategy, timeout=30):
        assert kind == "DataError"
        assert "predict dataloader has no batch on rank 1, rank 0 ha" in message


class Peeks(Indexed):
    """Evaluates between training steps in inference mode, which Lightning enters on every backend but gloo."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            strategy = self.trainer.strategy
            first, second = strategy.predict_step(batch, 0), strategy.validation_step(batch, 0)
        assert second is None
        assert not first[1].requires_grad
        assert not first[1].is_inference()


def _peeked(strategy: str, precision: str) -> list[dict[str, Tensor]]:
    results = []
    for kind in (Indexed, Peeks):
        pl.seed_everything(1, verbose=False)
        module = kind()
        quiet_trainer(strategy=strategy, precision=precision, max_epochs=1).fit(module, data())
        results.append(whole_parameters(module))
    return results


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op"], 2))
@PRECISIONS
def test_training_goes_on_after_evaluation_in_inference_mode(strategy: str, precision: str) -> None:
    for plain, peeked in run_distributed(_peeked, 2, strategy, precision):
        assert all(torch.equal(plain[name], peeked[name]) for name in plain)
