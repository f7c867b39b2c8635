"""`EMACallback`: on every engine bit by bit the average that Lightning's callback takes under its own DDP."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shard import EMACallback, full_tensor
from lightning_shard.checkpoint.inspect import describe
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.strategy import ShardStrategy
from lightning_shard.tools import convert, export
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

DECAY = 0.7
ENGINES = [
    *("shard_fsdp", "shard_ddp", "shard_fsdp_grad_op", "shard_fsdp_offload", "shard_deepspeed_stage_1"),
    *("shard_deepspeed_stage_2", "shard_deepspeed_stage_3", "shard_deepspeed_stage_3_offload"),
]


class Net(pl.LightningModule):
    """Odd sizes, running statistics, a frozen parameter, a tied one, a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 7))
        self.head = nn.Linear(7, 1)
        self.body.append(nn.Linear(7, 7))
        self.body[4].bias = self.body[3].bias
        self.frozen = nn.Parameter(torch.full((3,), 0.3), requires_grad=False)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        (x,) = batch
        return (self.head(self.body(x * self.frozen)).float() - x.sum(-1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.passing += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.loss(batch))
        self.seen.append(self.passing.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class SavesInValidation(pl.Callback):
    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


class Watched(pl.Callback):
    """The full parameters, and the buffers, in each validation and at the end; what rank 0's validation logged."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.logged: list[float] = []

    def _note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        ours = isinstance(trainer.strategy, ShardStrategy)
        parameters = {n: full_tensor(trainer, n) if ours else p.clone() for n, p in module.named_parameters()}
        self.states.append({**parameters, **{n: b.clone() for n, b in module.named_buffers()}})

    def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._note(trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.logged.append(trainer.callback_metrics["val"].item())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._note(trainer, module)


def averaging(kind: str, *, stock: bool = False) -> pl.Callback:
    if kind == "mean":
        # Torch averages with another kernel on a device.
        return WeightAveraging(device="cpu") if stock else EMACallback(decay="equal", device="cpu")
    options: dict[str, Any] = {
        "late": {"update_starting_at_step": 1, "update_every_n_steps": 2},
        "second": {"update_starting_at_epoch": 1},
        "never": {"update_starting_at_step": 100},
        "kept": {"evaluate": "weights"},
        "weights": {"use_buffers": False},
    }.get(kind, {})
    return (EMAWeightAveraging if stock else EMACallback)(decay=DECAY, **options)


def fit(
    strategy: Any, kind: str = "ema", path: str | None = None, save: str | None = None, *more: pl.Callback, **flags: Any
) -> Any:
    pl.seed_everything(1, verbose=False)
    module, watched = Net(), Watched()
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    # Lightning's own sampler would shuffle.
    loader = DataLoader(TensorDataset(x), batch_size=4, sampler=DistributedSampler(x, shuffle=False))
    saver = ModelCheckpoint(
        dirpath=Path(save or ".").parent,
        filename=Path(save or "").name + "-{step}",
        every_n_train_steps=3,
        save_top_k=-1,
    )
    callbacks = [watched, *([saver] if save else []), *more]
    if kind != "none":
        callbacks.insert(0, averaging(kind, stock=strategy == "ddp"))
    flags = {"num_sanity_val_steps": 0, "limit_val_batches": 1, "max_epochs": 2, **flags}
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, enable_checkpointing=bool(save), **flags)
    trainer.fit(module, loader, loader, ckpt_path=path)
    return watched.states, watched.logged, trainer


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _both(strategy: str, kind: str, **flags: Any) -> Any:
    return [fit(name, kind, **flags)[:2] for name in ("ddp", strategy)]


@pytest.mark.parametrize("strategy", sampled(ENGINES, 0))
def test_an_average_is_that_of_stock_ddp(strategy: str) -> None:
    averages = []
    for kind in ("ema", "mean", "late"):
        ((stock, logged), (ours, seen)), (_, (other, _)) = run_distributed(_both, 2, strategy, kind)
        assert logged == seen
        averages.append(ours[0]["head.weight"])
        # Two validations, and the end of the fit.
        assert [differing(*pair) for pair in zip(stock, ours, strict=True)] == [[]] * 3
        assert [differing(*pair) for pair in zip(ours, other, strict=True)] == [[]] * 3
    assert not any(torch.equal(one, other) for one, other in combinations(averages, 2))


def _others(strategies: list[str], kinds: list[str], precision: str) -> Any:
    return [fit(name, kind, precision=precision)[0] for name in strategies for kind in kinds]


def _options(folder: str) -> Any:
    kinds = ("none", "never", "kept", "second", "weights")
    found = {kind: fit("shard_fsdp", kind, save=f"{folder}/{kind}")[0] for kind in kinds}
    stored = {kind: open_portable(f"{folder}/{kind}-step=6.ckpt") for kind in kinds}
    counts = {
        kind: int(each.trainer_state["averaging_state"]["n_averaged"])
        for kind, each in stored.items()
        if each.has_averages
    }
    return found, counts, {key for key in stored["weights"].tensors if key.startswith("average.")}


@pytest.mark.matrix
def test_what_is_averaged_and_evaluated_is_an_option(tmp_path: Path) -> None:
    (found, counts, averaged), _ = run_distributed(_options, 2, str(tmp_path))
    # The weights themselves are evaluated ahead of the first update, and where the average is in checkpoints alone.
    for kind in ("never", "kept"):
        assert [differing(*pair) for pair in zip(found["none"], found[kind], strict=True)] == [[]] * 3
    # The first update of the second epoch is its first step.
    first, *later = (differing(*pair) for pair in zip(found["none"], found["second"], strict=True))
    assert (first, ["head.weight" in each for each in later]) == ([], [True, True])
    assert counts == {"kept": 6, "second": 3, "weights": 6}
    assert averaged == {f"average.{name}" for name, _ in Net().named_parameters()}


@pytest.mark.parametrize(
    "strategy",
    sampled([f"{name}_aligned" for name in ("shard_deepspeed_stage_2", "shard_fsdp", "shard_deepspeed_stage_3")], 0),
)
def test_averages_are_of_masters_in_bf16(strategy: str) -> None:
    ((one, other), _) = run_distributed(_others, 2, ["shard_ddp_aligned", strategy], ["ema"], "bf16-mixed")
    assert [differing(*pair) for pair in zip(one, other, strict=True)] == [[]] * 3
    assert one[0]["body.0.weight"].dtype == torch.float32
    assert not torch.equal(one[0]["body.0.weight"], one[0]["body.0.weight"].bfloat16().float())


# Checkpoints


def _saved(folder: str) -> Any:
    """The last states of fits that save after three of six steps."""
    stock = fit("ddp", save=f"{folder}/stock")[0]
    ours = fit("shard_fsdp", save=f"{folder}/ours")[0]
    fit("shard_deepspeed_stage_2", "none", save=f"{folder}/without")
    return stock[1:], ours[1:]


def _saved_in_validation(strategy: str) -> Any:
    usual = fit(strategy)[0]
    states = fit(strategy, "ema", None, None, SavesInValidation())[0]
    stored = open_portable("3.ckpt")
    weights = {k.removeprefix("model."): t.read() for k, t in stored.tensors.items() if k.startswith("model.")}
    averages = {k.removeprefix("model."): t.read() for k, t in stored.averaged().tensors.items() if "model." in k}
    return usual, states, weights, averages


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["shard_fsdp", "shard_deepspeed_stage_3_aligned"])
def test_a_save_in_validation_has_the_weights_and_leaves_the_average(strategy: str) -> None:
    (usual, states, weights, averages), _ = run_distributed(_saved_in_validation, 2, strategy)
    assert [differing(*pair) for pair in zip(usual, states, strict=True)] == [[]] * 3
    assert not [name for name in averages if not torch.equal(averages[name], states[0][name])]
    assert {"head.weight", "body.1.running_mean"} <= set(differing(weights, averages))


def _resumed(runs: list[tuple[str, str, str]]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [fit(strategy, kind, path=path)[0][-2:] for strategy, kind, path in runs]
    return found, [str(warning.message) for warning in caught]


def _validated(runs: list[tuple[str, str, str]]) -> Any:
    found = []
    for strategy, kind, path in runs:
        watched = Watched()
        callbacks = [watched, *([averaging(kind)] if kind != "none" else [])]
        trainer = quiet_trainer(strategy=strategy, callbacks=callbacks)
        trainer.validate(
            Net(), DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2), ckpt_path=path, verbose=False
        )
        found.append(watched.states[0])
    return found


@pytest.mark.matrix
def test_an_average_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (stock, ours), _ = run_distributed(_saved, 2, str(tmp_path))
    assert [differing(*pair) for pair in zip(stock, ours, strict=True)] == [[]] * 2
    files = {name: str(tmp_path / f"{name}-step=3.ckpt") for name in ("stock", "ours", "without", "full")}
    assert convert(files["ours"], files["full"]).form == "full"
    average = torch.load(files["stock"], weights_only=False)["state_dict"]
    del average["body.4.bias"]  # tied

    # On another engine, from stock Lightning's file, and by stock Lightning from ours.
    runs = [
        ("shard_deepspeed_stage_2", "ema", files["ours"]),
        ("shard_ddp", "ema", files["stock"]),
        ("ddp", "ema", files["full"]),
    ]
    (found, _), _ = run_distributed(_resumed, 2, runs)
    # A buffer with persistent=False is in no checkpoint.
    assert [differing(stock[-1], states[-1]) for states in found] == [["passing"]] * 3

    # Without the callback the weights go on, and without averages these begin with the weights.
    (((weights, begun), said), _) = run_distributed(
        _resumed, 2, [("shard_fsdp", "none", files["ours"]), ("shard_fsdp", "ema", files["without"])]
    )
    assert "head.weight" in differing(weights[-1], stock[-1])
    assert "head.weight" in differing(begun[-1], weights[-1])
    assert len([text for text in said if "has no averages of weights: they begin with its weights" in text]) == 1

    # Evaluated and exported.
    runs = [(name, kind, files["ours"]) for name, kind in (("shard_fsdp", "ema"), ("shard_ddp", "none"))]
    ((averaged, plain), _) = run_distributed(_validated, 2, runs)
    assert not [name for name in average if not torch.equal(averaged[name], average[name])]
    assert "head.weight" in differing(averaged, plain)
    export(files["ours"], tmp_path / "average", ema=True)
    exported = load_file(tmp_path / "average" / "model.safetensors")
    assert differing(exported, average) == []
    with pytest.raises(CheckpointError, match="has no averages of weights; EMACallback takes them"):
        export(files["without"], tmp_path / "none", ema=True)
    assert ", 13 averages;" in describe(files["ours"], open_portable(files["ours"]))
