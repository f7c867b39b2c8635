"""Streams and uneven data under Lightning's Trainer: they go on after the last batch, and end together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from lightning_shard.errors import DataError
from tests.harness import run_distributed
from tests.resume.trainer import check_resumed, fit


class Counting(IterableDataset[torch.Tensor]):
    """A stream per rank that knows where it is and starts anew after its end."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 2 * 5:
            self.position += 1
            yield torch.tensor(100 * dist.get_rank() + self.position)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _stream(save: tuple[str, int], options: dict[str, Any]) -> Any:
    common: dict[str, Any] = {"shuffle": None}
    runs = [(1, {}), (1, {"save": save}), (77, {"ckpt_path": "saved.ckpt"})]
    whole, before, after = (
        fit(seed=seed, trainer=dict(options), dataset=Counting(), **extra, **common) for seed, extra in runs
    )
    return whole, before["seen"][: save[1]], after


@pytest.mark.parametrize("options", [{"max_epochs": 3}, {"max_steps": 12}, {"max_epochs": 3, "limit_train_batches": 3}])
@pytest.mark.parametrize(("hook", "step"), [("train_batch_end", 1), ("train_batch_end", 7), ("train_epoch_end", 5)])
def test_stateful_stream_goes_on_after_the_last_batch_trained_on(hook: str, step: int, options: dict[str, Any]) -> None:
    """The trainer fetches one batch ahead of a stream without an end in sight, and none of a limited one."""
    if hook == "train_epoch_end":
        step = options.get("limit_train_batches", step)
    save = (hook, step)
    check_resumed(run_distributed(_stream, 2, save, options), save)


class Uneven(IterableDataset[torch.Tensor]):
    """Rank r gives r samples more than rank 0."""

    def __iter__(self) -> Any:
        yield from torch.arange(5 + dist.get_rank())


def _uneven_stream() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(seed=1, trainer={"max_epochs": 2}, dataset=Uneven(), shuffle=None, batch_size=1)
    said = [str(warning.message) for warning in caught if "ran out" in str(warning.message)]
    return [step[2] for step in run["seen"]], said


def test_uneven_streams_end_their_epochs_together() -> None:
    for seen, said in run_distributed(_uneven_stream, 2):
        assert seen == [[0], [1], [2], [3], [4]] * 2
        assert len(said) == 2
        assert "ran out on rank 0 after 5 batches, rank 1 had more" in said[0]


def _uneven_lists() -> str:
    sampler = range(8 + 2 * dist.get_rank())
    try:
        fit(seed=1, trainer={"max_epochs": 1, "use_distributed_sampler": False}, sampler=sampler, shuffle=None)
    except DataError as error:
        return str(error)
    return "trained"


def test_uneven_lengths_are_refused_before_training() -> None:
    first, second = run_distributed(_uneven_lists, 2)
    assert first == second
    assert "rank 0: 4 batches\n  rank 1: 5 batches" in first
