"""States of metrics, without a Trainer: they go on bitwise, and are merged at another world size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

from lightning_shard.resume.metrics import load_metric_states, metric_states
from tests.resume.support import through_file

# Metrics of a module, without a Trainer


class Words(Metric):
    """A list state of strings, which torchmetrics itself has in its text metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx="cat")

    def update(self, word: str) -> None:
        self.words.append(word)

    def compute(self) -> int:
        return len(self.words)


class Weird(Metric):
    """A state that can't be saved without running code when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("things", [], dist_reduce_fx="cat")

    def update(self) -> None:
        self.things.append(object())

    def compute(self) -> int:
        return len(self.things)


class Zoo(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.mean, self.cat, self.peak = MeanMetric(), CatMetric(), MaxMetric()
        self.running = RunningMean(window=3)
        self.minmax = MinMaxMetric(BinaryAccuracy())
        # Both in one compute group, whose states are shared.
        self.collection = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)
        self.pearson = PearsonCorrCoef()
        self.composed = self.mean + self.peak
        self.words = Words()

    def feed(self, step: int) -> None:
        values = torch.rand(5, generator=torch.Generator().manual_seed(step))
        targets = (values.flip(0) > 0.5).int()
        for metric in (self.mean, self.cat, self.peak, self.running):
            metric.update(values)
        self.minmax(values, targets)
        self.collection.update(values, targets)
        if step % 2 == 0 or not self.tracker.n_steps:
            self.tracker.increment()
        self.tracker.update(values, targets.float())
        self.pearson.update(values, targets.float())
        self.words.update(f"word{step}")

    def results(self) -> list[Any]:
        singles = (self.mean, self.cat, self.peak, self.running, self.pearson, self.composed, self.words)
        values = [metric.compute() for metric in singles]
        values += [*self.minmax.compute().values(), *self.collection.compute().values(), self.tracker.compute_all()]
        return [value.tolist() if isinstance(value, Tensor) else value for value in values]


def test_every_kind_of_metric_goes_on_bitwise() -> None:
    whole, first, second = Zoo(), Zoo(), Zoo()
    for step in range(7):
        whole.feed(step)
    for step in range(4):
        first.feed(step)
    expected_there = first.results()
    load_metric_states(second, [through_file(metric_states(first))], rank=0, world_size=1)
    assert second.results() == expected_there
    counts = {name: m.update_count for name, m in first.named_modules() if isinstance(m, Metric)}
    assert counts == {name: m.update_count for name, m in second.named_modules() if isinstance(m, Metric)}
    assert sum(counts.values()) > 20
    for step in range(4, 7):
        second.feed(step)
    assert second.results() == whole.results()


class Mergeable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean, self.peak, self.cat = SumMetric(), MeanMetric(), MaxMetric(), CatMetric()
        self.collection = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.words = Words()

    def feed(self, rank: int) -> None:
        # Multiples of 1/8: sums are exact in any order.
        values = torch.arange(1, 5) / 8 + rank / 8
        for metric in (self.total, self.mean, self.peak, self.cat):
            metric.update(values)
        self.collection.update(values.clamp(max=1), torch.tensor([rank % 2, 1, 0, 1]))
        self.words.update(f"rank{rank}")

    def results(self) -> list[Any]:
        values = [self.total.compute(), self.mean.compute(), self.peak.compute(), *self.collection.compute().values()]
        return [*(value.item() for value in values), self.cat.compute().tolist(), self.words.words]


@pytest.mark.parametrize(("old", "new"), [(2, 1), (3, 2), (1, 2)])
def test_old_ranks_are_merged_at_another_world_size(old: int, new: int) -> None:
    by_rank = []
    for rank in range(old):
        module = Mergeable()
        module.feed(rank)
        by_rank.append(metric_states(module))
    for rank in range(new):
        module, expected = Mergeable(), Mergeable()
        # Left from before: it must not stay.
        module.feed(17)
        for old_rank in range(rank, old, new):
            expected.feed(old_rank)
        load_metric_states(module, by_rank, rank=rank, world_size=new)
        if rank < old:
            assert module.results() == expected.results()
        assert module.total.update_count == len(range(rank, old, new))


def test_mean_states_weigh_ranks_alike() -> None:
    class Average(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, value: float) -> None:
            self.average = torch.tensor(value)

        def compute(self) -> Tensor:
            return self.average

    by_rank = []
    for value in (1.0, 2.0, 6.0):
        module = nn.ModuleDict({"average": Average()})
        module["average"].update(value)
        module["average"].update(value)
        by_rank.append(metric_states(module))
    module = nn.ModuleDict({"average": Average()})
    load_metric_states(module, by_rank, rank=0, world_size=1)
    # As torchmetrics' own mean across ranks.
    assert module["average"].compute().item() == 3.0
    assert module["average"].update_count == 6


def test_what_cannot_be_merged_is_named_and_reset() -> None:
    by_rank = []
    for rank in range(2):
        zoo = Zoo()
        zoo.feed(rank)
        by_rank.append(metric_states(zoo))
    for rank, expected in ((0, 1), (1, 0)):
        zoo = Zoo()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_metric_states(zoo, [*by_rank, by_rank[0]], rank=rank, world_size=2)
        messages = [str(w.message) for w in caught if "start again" in str(w.message)]
        assert len(messages) == expected
        assert all("pearson can't be merged across ranks" in message for message in messages)
        assert zoo.pearson.update_count == 0
        assert zoo.mean.update_count == (2 if rank == 0 else 1)


def test_changed_code_warns_once_and_goes_on() -> None:
    old = nn.ModuleDict({"same": SumMetric(), "gone": SumMetric(), "retyped": SumMetric(), "resized": PerClass(3)})
    for metric in old.values():
        metric.update(2.0)
    new = nn.ModuleDict({"same": SumMetric(), "fresh": SumMetric(), "retyped": MeanMetric(), "resized": PerClass(4)})
    with pytest.warns(UserWarning, match="start again after resuming") as caught:
        load_metric_states(new, [metric_states(old)], rank=0, world_size=1)
    [message] = [str(w.message) for w in caught]
    for part in (
        "fresh is new",
        "gone is no longer in the module",
        "retyped has states",
        "resized has a state per_class",
    ):
        assert part in message
    assert "same" not in message
    assert new["same"].compute() == 2.0
    assert [new[name].update_count for name in ("fresh", "retyped", "resized")] == [0] * 3


class PerClass(Metric):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("per_class", torch.zeros(classes), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.per_class = self.per_class + value

    def compute(self) -> Tensor:
        return self.per_class


def test_a_state_of_other_objects_is_left_out_aloud() -> None:
    module = nn.ModuleDict({"weird": Weird(), "total": SumMetric()})
    module["weird"].update()
    with pytest.warns(UserWarning, match=r"weird \(object\)"):
        states = metric_states(module)
    assert list(through_file(states)) == ["total"]
