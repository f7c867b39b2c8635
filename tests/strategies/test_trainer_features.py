"""What Lightning's Trainer offers works on sharded and replicated modules alike: flags, loops, samplers, prediction."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, TensorDataset

from tests.harness import run_distributed
from tests.models import quiet_trainer, whole_parameters

STRATEGIES = ["shard_ddp", "shard_fsdp"]
BOTH = pytest.mark.parametrize("strategy", STRATEGIES)
# bf16-mixed takes other ways through the engines: casts, and the FSDP2-based replicate under shard_ddp.
ALL = pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("shard_ddp", "32-true"),
        ("shard_fsdp", "bf16-mixed"),
        pytest.param("shard_ddp", "bf16-mixed", marks=pytest.mark.matrix),
        pytest.param("shard_fsdp", "32-true", marks=pytest.mark.matrix),
    ],
)
PRECISIONS = pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.matrix), "bf16-mixed"])

COUNT = 24
# Of outputs and means of a handful of products, which a batch of another size may add up in another order: some
# roundings of fp32 (2**-24) or bf16 (2**-9).
ROUNDING = {"32-true": 1e-6, "bf16-mixed": 2**-6}


class Indexed(pl.LightningModule):
    """A regressor whose batches hold their samples' indices, so that a test sees which rank got what."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.lr = lr
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}
        self.events: list[str] = []
        self.modes: dict[str, set[tuple[bool, bool]]] = defaultdict(set)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)

    def _note(self, stage: str, index: Tensor) -> None:
        self.seen[stage].append(index.tolist())
        self.modes[stage].add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def loss(self, batch: Any, stage: str) -> Tensor:
        index, x = batch
        self._note(stage, index)
        return (self(x).float() - x.sum(-1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch, "val"), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, "test"), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        index, x = batch
        self._note("predict", index)
        return index, self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_train_epoch_start(self) -> None:
        self.events.append("train epoch")

    def on_validation_epoch_start(self) -> None:
        self.events.append(f"val at {self.trainer.global_step}")


def samples(count: int = COUNT) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))


def data(batch_size: int = 2, *, count: int = COUNT, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size, **kwargs)


def build(seed: int = 1, **kwargs: Any) -> Indexed:
    # Not `seed_everything`, whose environment variable would stay in the test's own process.
    torch.manual_seed(seed)
    return Indexed(**kwargs)


def refusal(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The error of ``fn(*args, **kwargs)`` as its type's name and message; on a worker, which lives on."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def flat(seen: list[list[int]]) -> list[int]:
    return [index for batch in seen for index in batch]


# Loops


def _fit(strategy: str, precision: str, flags: dict[str, Any], loader: dict[str, Any] | None = None) -> dict[str, Any]:
    module = build()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = quiet_trainer(strategy=strategy, precision=precision, **flags)
    trainer.fit(module, data(shuffle=True, **(loader or {})), data())
    end = whole_parameters(module)
    return {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "events": module.events,
        "seen": module.seen,
        "moved": any(not torch.equal(start[name], end[name]) for name in start),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "end": end,
    }


def fits(strategy: str, precision: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_fit(strategy, precision, flags) for flags in runs]


@ALL
def test_flags_that_limit_and_time_the_loops(strategy: str, precision: str) -> None:
    runs = [
        {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 2},
        {"limit_train_batches": 0.5, "limit_val_batches": 0.25, "max_epochs": 1, "num_sanity_val_steps": 0},
        {"val_check_interval": 0.5, "max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_steps": 9, "num_sanity_val_steps": 0},
        {"fast_dev_run": 2},
        {"overfit_batches": 2, "max_epochs": 3},
        {"num_sanity_val_steps": 3, "max_steps": 1},
        {"num_sanity_val_steps": -1, "max_steps": 1, "limit_val_batches": 0},
    ]
    ranks = run_distributed(fits, 2, strategy, precision, runs)
    limited, half, twice, by_steps, dev, overfit, sanity, no_val = zip(*ranks, strict=True)
    for rank in range(2):
        assert (limited[rank]["steps"], limited[rank]["epochs"]) == (6, 2)
        # 24 samples are 12 for each rank, 6 batches of 2.
        assert limited[rank]["events"] == ["val at 0", "train epoch", "val at 3", "train epoch", "val at 6"]
        assert (half[rank]["steps"], len(half[rank]["seen"]["val"])) == (3, 1)
        assert twice[rank]["events"] == ["train epoch", "val at 3", "val at 6"]
        assert by_steps[rank]["events"] == ["train epoch", "val at 4", "train epoch", "val at 8"]
        assert (dev[rank]["steps"], len(dev[rank]["seen"]["val"])) == (2, 2)
        batches = overfit[rank]["seen"]["train"]
        assert batches == batches[:2] * 3
        assert len(set(flat(batches))) == 4
        assert (sanity[rank]["events"][0], len(sanity[rank]["seen"]["val"])) == ("val at 0", 3)
        assert no_val[rank]["seen"]["val"] == []
        assert all(run["moved"] for run in ranks[rank])
    assert not set(flat(overfit[0]["seen"]["train"])) & set(flat(overfit[1]["seen"]["train"]))
    assert [run["metrics"] for run in ranks[0]] == [run["metrics"] for run in ranks[1]]


def _timed(strategy: str) -> tuple[int, float, bool]:
    module = build()
    # Only this rank's clock is late: the decision must be common.
    module.on_train_batch_start = lambda batch, index: time.sleep(0.02 * dist.get_rank())
    trainer = quiet_trainer(strategy=strategy, max_time={"milliseconds": 700}, max_epochs=-1)
    began = time.monotonic()
    trainer.fit(module, data())
    return trainer.global_step, time.monotonic() - began, trainer.should_stop


@BOTH
def test_max_time_stops_all_ranks_after_the_same_step(strategy: str) -> None:
    (steps, seconds, stopped), (other_steps, _, other_stopped) = run_distributed(_timed, 2, strategy)
    assert steps == other_steps > 0
    assert stopped
    assert other_stopped
    assert 0.7 < seconds < 60


@ALL
def test_profiler_determinism_and_anomaly_detection(strategy: str, precision: str) -> None:
    plain, *others = run_distributed(_debugged, 2, strategy, precision)[0]
    for parameters in others:
        assert all(torch.equal(plain[name], parameters[name]) for name in plain)


def _debugged(strategy: str, precision: str) -> list[dict[str, Tensor]]:
    flags: list[dict[str, Any]] = [{}, {"deterministic": True}, {"detect_anomaly": True}, {"profiler": "simple"}]
    results = []
    for extra in flags:
        module = build()
        trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=4, **extra)
        trainer.fit(module, data(), data())
        results.append(whole_parameters(module))
        if "deterministic" in extra:
            assert torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(False)
        if "profiler" in extra:
            name = f"[Strategy]{type(trainer.strategy).__name__}.training_step"
            assert len(trainer.profiler.recorded_durations[name]) == 4
            assert name in trainer.profiler.summary()
    return results


class NotANumber(Indexed):
    def loss(self, batch: Any, stage: str) -> Tensor:
        # The square root of zero has an infinite slope, and that times zero is no number.
        return super().loss(batch, stage) + (self.head.bias * 0).sqrt().sum()


def _anomaly(strategy: str) -> None:
    quiet_trainer(strategy=strategy, detect_anomaly=True, max_steps=2).fit(NotANumber(), data())


@BOTH
def test_anomaly_detection_finds_the_operation(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _anomaly, strategy):
        assert kind == "RuntimeError"
        assert "'MulBackward0' returned nan" in message


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
    elif kind == "batches":
        loader = DataLoader(samples(), batch_sampler=OwnBatches(SequentialSampler(range(COUNT))))
    elif kind == "distributed":
        sampler = torch.utils.data.DistributedSampler(samples(), shuffle=False)
        loader = DataLoader(samples(), batch_size=3, sampler=sampler)
    else:
        loader, flags = data(), {"use_distributed_sampler": False}
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, **flags)
    trainer.fit(module, loader)
    assert isinstance(trainer.train_dataloader.batch_sampler, OwnBatches) == (kind == "batches")
    return module.seen["train"]


@BOTH
def test_samplers(strategy: str) -> None:
    one, other = run_distributed(_sampled, 2, strategy, "own")
    # Lightning shuffles what a sampler of training data gives before it deals it out.
    assert sorted(flat(one) + flat(other)) == list(range(0, COUNT, 3))
    assert len(one) == len(other) == 2

    one, other = run_distributed(_sampled, 2, strategy, "batches")
    assert sorted(flat(one) + flat(other)) == list(range(COUNT))

    one, other = run_distributed(_sampled, 2, strategy, "distributed")
    assert one[0] == [0, 2, 4]
    assert other[0] == [1, 3, 5]

    one, other = run_distributed(_sampled, 2, strategy, "off")
    assert one == other
    assert flat(one) == list(range(COUNT))


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
                expected = build().to(dtype)(samples(count).tensors[1].to(dtype))
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


# What a module may ask of its strategy


class Collective(Indexed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = self.global_rank
        self.log("mean", float(rank), sync_dist=True)
        self.log("total", float(rank + 1), sync_dist=True, reduce_fx="sum")
        self.log("epoch_max", float(10 * rank + batch_idx), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("own", float(rank))
        output = self(batch[1])
        gathered = self.all_gather(output, sync_grads=True)
        nested = self.all_gather({"rank": torch.tensor([rank]), "list": [torch.tensor(rank * 2.0)]})
        assert nested["rank"].flatten().tolist() == [0, 1]
        assert nested["list"][0].tolist() == [0.0, 2.0]
        assert gathered.shape == (2, *output.shape)
        assert torch.equal(gathered[rank], output)
        strategy = self.trainer.strategy
        strategy.barrier("here")
        assert strategy.broadcast({"from": rank}) == {"from": 0}
        assert strategy.broadcast(rank, src=1) == 1
        assert strategy.reduce(torch.tensor(float(rank + 1))).item() == 1.5
        assert strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item() == 3
        assert strategy.reduce("text") == "text"
        assert strategy.reduce_boolean_decision(rank == 1) is False
        assert strategy.reduce_boolean_decision(rank == 1, all=False) is True
        assert (strategy.world_size, strategy.global_rank, strategy.is_global_zero) == (2, rank, rank == 0)
        return {"loss": gathered.square().mean(), "extra": output.detach()}


def _collectives(strategy: str, precision: str) -> tuple[dict[str, float], Any]:
    pl.seed_everything(1, verbose=False)
    module = Collective()
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, limit_train_batches=3)
    trainer.fit(module, data())
    return {k: v.item() for k, v in trainer.callback_metrics.items()}, whole_parameters(module)


@ALL
def test_collectives_of_the_module_and_the_strategy(strategy: str, precision: str) -> None:
    (one, parameters), (other, others) = run_distributed(_collectives, 2, strategy, precision)
    assert (one["mean"], one["total"], one["epoch_max"]) == (0.5, 3.0, 12.0)
    assert (one.pop("own"), other.pop("own")) == (0.0, 1.0)
    assert one == other
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


class NoOptimizer(Indexed):
    def configure_optimizers(self) -> None:
        return None


def _without_optimizer(strategy: str) -> tuple[bool, int]:
    pl.seed_everything(1, verbose=False)
    module = NoOptimizer()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=2).fit(module, data(), data())
    end = whole_parameters(module)
    return all(torch.equal(start[name], end[name]) for name in start), len(module.seen["train"])


@BOTH
def test_fit_without_an_optimizer_changes_nothing(strategy: str) -> None:
    assert run_distributed(_without_optimizer, 2, strategy) == [(True, 2)] * 2


def _sync_batchnorm(strategy: str) -> None:
    quiet_trainer(strategy=strategy, sync_batchnorm=True)


@BOTH
def test_sync_batchnorm_is_refused_on_cpu(strategy: str) -> None:
    for kind, message in run_distributed(refusal, 2, _sync_batchnorm, strategy):
        assert kind == "ConfigurationError"
        assert "sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs alone" in message


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


@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op"])
@PRECISIONS
def test_training_goes_on_after_evaluation_in_inference_mode(strategy: str, precision: str) -> None:
    for plain, peeked in run_distributed(_peeked, 2, strategy, precision):
        assert all(torch.equal(plain[name], peeked[name]) for name in plain)


# Gradients


def _has_gradients(trainer: pl.Trainer) -> bool:
    # Those that are stepped: inside a step FSDP has others in their place.
    return any(p.grad is not None for group in trainer.optimizers[0].param_groups for p in group["params"])


def _held_in_forward(strategy: str, precision: str, watched: bool, **flags: Any) -> tuple[list[bool], list[bool]]:
    """Whether there were gradients when each batch's forward began, and when they were dropped, where that is seen."""

    class Looking(Indexed):
        held: list[bool] = []  # noqa: RUF012

        def training_step(self, *args: Any) -> Any:
            self.held.append(_has_gradients(self.trainer))
            return super().training_step(*args)

    class Watching(pl.Callback):
        seen: list[bool] = []  # noqa: RUF012

        def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            self.seen.append(_has_gradients(trainer))

    torch.manual_seed(1)
    module, watching = Looking(), Watching()
    callbacks = [watching] if watched else []
    quiet_trainer(strategy=strategy, precision=precision, max_epochs=1, callbacks=callbacks, **flags).fit(
        module, data()
    )
    return module.held, watching.seen


@pytest.mark.parametrize(("strategy", "precision"), [("shard_ddp", "32-true"), ("shard_fsdp", "bf16-mixed")])
def test_no_forward_runs_beside_the_gradients_of_the_step_before(strategy: str, precision: str) -> None:
    (held, _), _ = run_distributed(_held_in_forward, 2, strategy, precision, False)
    assert len(held) > 2
    assert not any(held)
    # Those of earlier micro-batches stay, and those that a hook is to see.
    (held, _), _ = run_distributed(_held_in_forward, 2, strategy, precision, False, accumulate_grad_batches=2)
    assert held == [index % 2 == 1 for index in range(len(held))]
    (held, seen), _ = run_distributed(_held_in_forward, 2, strategy, precision, True)
    assert seen == held == [index > 0 for index in range(len(held))]
