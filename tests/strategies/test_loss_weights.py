"""Losses with weights: the same global batch split in any way has the same gradient, on every engine."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard import ConfigurationError, DataError, ShardPrecision, full_tensor
from lightning_shard.precision.loss_weight import WeightKey
from lightning_shard.registry import build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import quiet_trainer

TOKENS, LENGTH, WIDTH = 11, 12, 16
IGNORED = -100
KEY = "labels != -100"
ENGINES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of 1 to 12 labelled tokens; those of the second global batch of 8 have none."""

    def __init__(self, empty: int | None = None) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, TOKENS, (32, LENGTH), generator=generator)
        self.labels = torch.randint(0, TOKENS, (32, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (32, 1), generator=generator)
        # One split of a batch has nearly all tokens.
        lengths[::2] = lengths[::2].clamp(max=2)
        if empty is not None:
            lengths[empty * 8 : empty * 8 + 8] = 0
        self.labels[torch.arange(LENGTH) >= lengths] = IGNORED

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class Model(pl.LightningModule):
    """Returns its loss in the ``form`` that is tried."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.form = form
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 31), nn.Tanh(), nn.Linear(31, WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.losses: list[float] = []
        self.found: dict[str, Tensor | None] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.head(self.block(self.embed(batch["tokens"]))).flatten(0, 1)
        labels = batch["labels"].flatten()
        number = (labels != IGNORED).sum()
        if self.form == "sum":
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            return {"loss": loss, "weight": number, "reduction": "sum"}
        loss = functional.cross_entropy(logits, labels)
        if self.form == "some":
            return {"loss": loss, "weight": number} if batch_idx == 0 else loss
        if self.form == "one rank":
            return {"loss": loss, "weight": number} if self.global_rank == 0 else loss
        if self.form == "negative":
            return {"loss": loss, "weight": -1}
        return {"loss": loss, "weight": number.item()} if self.form == "mean" else loss

    def configure_optimizers(self) -> Any:
        if self.form == "decayed":
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    def on_train_batch_end(self, output: Any, batch: Any, index: int) -> None:
        ends = (index + 1) % self.trainer.accumulate_grad_batches == 0
        if ends and "weighted_loss" in self.trainer.callback_metrics:
            self.losses.append(float(self.trainer.callback_metrics["weighted_loss"]))

    def on_train_end(self) -> None:
        self.found = {name: full_tensor(self.trainer, name) for name, _ in self.named_parameters()}


def _fit(
    name: str,
    form: str,
    *,
    micro: int,
    accumulate: int,
    key: str | None = None,
    empty: int | None = None,
    precision: str = "32-true",
    steps: int = 4,
) -> tuple[dict[str, Tensor | None], list[float]]:
    pl.seed_everything(1, verbose=False)
    data, module = Sequences(empty), Model(form)
    loader = DataLoader(data, micro, sampler=DistributedSampler(data, shuffle=False))
    trainer = quiet_trainer(
        strategy=build(name, loss_weight_key=key),
        plugins=[ShardPrecision(precision)],  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=0.3,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, loader)
    return module.found, module.losses


def _splits(name: str) -> list[Any]:
    return [_fit(name, "mean", micro=micro, accumulate=accumulate) for micro, accumulate in ((4, 1), (2, 2))]


def _far(one: Any, other: Any) -> float:
    """The largest difference of two runs' parameters, of which the largest is about 2."""
    pairs = zip(one[0].values(), other[0].values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


# Sums of fp32 in another order: four steps of gradients of about 0.1, each off by some spacings of 2**-24.
ORDER = 2e-6


def _one_process() -> Any:
    return run_distributed(_fit, 1, "shard_ddp_aligned", "mean", micro=8, accumulate=1)[0]


@pytest.mark.parametrize("name", sampled(ENGINES, 1))
def test_splits_of_a_global_batch_agree(name: str) -> None:
    wanted = _one_process()
    found = run_distributed(_splits, 2, f"shard_{name}_aligned")
    for split in found[0]:
        assert _far(wanted, split) < ORDER
        assert split[1] == pytest.approx(wanted[1], rel=1e-6)
    assert [losses for _, losses in found[0]] == [losses for _, losses in found[1]]


def test_the_comparison_sees_that_losses_are_not_weighted() -> None:
    wanted = run_distributed(_fit, 1, "shard_ddp_aligned", "plain", micro=8, accumulate=1)[0]
    found = run_distributed(_fit, 2, "shard_ddp_aligned", "plain", micro=4, accumulate=1)[0]
    assert _far(wanted, found) > 1000 * ORDER


def test_sums_and_keys() -> None:
    wanted = _one_process()
    for form, key in (("sum", None), ("plain", KEY)):
        found = run_distributed(_fit, 2, "shard_fsdp", form, micro=1, accumulate=4, key=key)[0]
        assert _far(wanted, found) < ORDER
    with pytest.raises(ConfigurationError, match="but must name an entry of the batch whose sum is the weight"):
        build("shard_ddp", loss_weight_key="labels != none")


@pytest.mark.parametrize(
    "name", sampled(["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2_offload", "deepspeed_stage_3"], 3)
)
def test_fp16_does_not_overflow_by_weights(name: str) -> None:
    """The gradients of a loss times its weight, 96, would at the first scales."""
    settings = {"micro": 2, "accumulate": 2, "precision": "16-mixed"}
    found = run_distributed(_fit, 2, f"shard_{name}_aligned", "mean", **settings)[0]
    wanted = _one_process()
    # Products of fp16 have 11 bits; the weights are about 1.
    assert _far(wanted, found) < 2**-9
    assert len(found[1]) == 4


@pytest.mark.parametrize("name", sampled(ENGINES, 4))
def test_a_step_without_weight_is_skipped(name: str) -> None:
    """Weight decay would move the parameters without a gradient."""
    settings = {"micro": 4, "accumulate": 1, "empty": 0, "steps": 1, "key": KEY}
    values, losses = run_distributed(_fit, 2, f"shard_{name}_aligned", "decayed", **settings)[0]
    start = {n: p.detach() for n, p in Model("decayed").named_parameters()}
    assert all(torch.equal(start[name], value) for name, value in values.items())
    assert losses == []


REFUSED = {
    "some": "gives a weight with some losses alone",
    "one rank": "none on ranks 1. Return the weight on every rank",
    "negative": "a weight of -1.0, but it must be 0 or more",
}


def _refusals() -> None:
    for form, message in REFUSED.items():
        with pytest.raises(DataError, match=message):
            _fit("shard_ddp", form, micro=4, accumulate=1)


def test_refused() -> None:
    run_distributed(_refusals, 2)


@pytest.mark.parametrize(
    ("batch", "key", "weight"),
    [
        ({"mask": torch.tensor([[1, 1, 0]])}, "mask", 2),
        ({"labels": torch.tensor([5, -100, 0])}, "labels != -100", 2),
        ((torch.zeros(3), torch.tensor([True, False])), "1", 1),
        ({"lengths": [2, 3]}, "lengths", 5),
        ({"values": torch.ones(3)}, "values", 3),
    ],
)
def test_weights_of_batches(batch: Any, key: str, weight: int) -> None:
    assert WeightKey.parse(key).weight_of(batch) == weight


@pytest.mark.parametrize(
    ("batch", "key", "message"),
    [
        ({"x": 1, "y": 2}, "mask", r"names 'mask', but the batch \(dict with the keys x, y\) has none"),
        ([torch.ones(2)], "1", r"names '1', but the batch \(list\) has none"),
    ],
)
def test_batches_that_lack_the_key(batch: Any, key: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        WeightKey.parse(key).weight_of(batch)
