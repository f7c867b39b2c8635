"""Interrupted and uninterrupted training under Lightning's Trainer see the same samples and random numbers."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.cluster import network
from lightning_shard.cluster.network import let_threads_finish_before_forks
from tests.groups import sampled
from tests.harness import run_distributed
from tests.resume.trainer import SAMPLES, check_resumed, fit


def _interrupted(save: tuple[str, int], first: dict[str, Any], rest: dict[str, Any], loader: dict[str, Any]) -> Any:
    """An uninterrupted run, and one that is saved and resumed, up to the save and from it on."""
    whole = fit(seed=1, trainer=dict(rest), **loader)
    before = fit(seed=1, trainer=first | {"validation": rest.get("validation", False)}, save=save, **loader)
    after = fit(seed=77, trainer=dict(rest), ckpt_path="saved.ckpt", **loader)
    return whole, before["seen"][: save[1]], after


# 22 samples in batches of 2 on 2 processes: 6 batches in an epoch.
EPOCH_BASED, STEP_BASED = {"max_epochs": 3}, {"max_steps": 17, "max_epochs": -1}
CASES = {
    "mid-epoch": (("train_batch_end", 9), EPOCH_BASED, EPOCH_BASED),
    "mid-epoch, steps": (("train_batch_end", 9), STEP_BASED, STEP_BASED),
    "first batch of an epoch": (("train_batch_end", 7), STEP_BASED, STEP_BASED),
    "epoch end": (("train_epoch_end", 6), EPOCH_BASED, EPOCH_BASED),
    "epoch end, steps": (("train_epoch_end", 12), STEP_BASED, STEP_BASED),
    "last batch of an epoch": (("train_batch_end", 6), EPOCH_BASED, EPOCH_BASED),
    "last batch of an epoch, steps": (("train_batch_end", 6), STEP_BASED, STEP_BASED),
    "after fit": (("end", 6), {"max_epochs": 1}, EPOCH_BASED),
    "after fit, steps": (("end", 12), STEP_BASED | {"max_steps": 12}, STEP_BASED),
    "cut by max_steps": (("train_epoch_end", 8), STEP_BASED | {"max_steps": 8}, STEP_BASED),
    "cut by max_steps, then epochs": (("end", 8), STEP_BASED | {"max_steps": 8}, EPOCH_BASED),
    "limited": (
        ("train_epoch_end", 8),
        EPOCH_BASED | {"limit_train_batches": 4},
        EPOCH_BASED | {"limit_train_batches": 4},
    ),
    "limited, steps, last batch": (
        ("train_batch_end", 4),
        STEP_BASED | {"limit_train_batches": 4},
        STEP_BASED | {"limit_train_batches": 4},
    ),
    "validation at the end": (
        ("validation_end", 6),
        EPOCH_BASED | {"validation": True},
        EPOCH_BASED | {"validation": True},
    ),
    "validation midway, steps": (
        ("validation_end", 9),
        STEP_BASED | {"validation": True, "val_check_interval": 3},
        STEP_BASED | {"validation": True, "val_check_interval": 3},
    ),
    "epoch end with validation, steps": (
        ("train_epoch_end", 6),
        STEP_BASED | {"validation": True},
        STEP_BASED | {"validation": True},
    ),
}
# With workers the order is theirs to prefetch; what the trainer's counters do is the same.
WITH_WORKERS = [
    pytest.param(case, 2, marks=[] if case in ("mid-epoch", "epoch end, steps") else pytest.mark.matrix)
    for case in CASES
]


@pytest.mark.parametrize(("case", "workers"), [*((case, 0) for case in CASES), *WITH_WORKERS])
def test_resumed_is_uninterrupted(case: str, workers: int) -> None:
    save, first, rest = CASES[case]
    results = run_distributed(_interrupted, 2, save, first, rest, {"num_workers": workers})
    check_resumed(results, save)


LOADERS = {
    "persistent workers": {"num_workers": 1, "persistent_workers": True},
    "unshuffled, larger batches": {"shuffle": False, "batch_size": 3},
    "own generator": {"generator": torch.Generator().manual_seed(2), "num_workers": 2},
    "own sampler": {"shuffle": False, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, 24)},
    "dropped tail": {"drop_last": True, "batch_size": 4},
}


@pytest.mark.parametrize("case", sampled(["mid-epoch, steps", "epoch end, steps", "after fit"], 0))
@pytest.mark.parametrize("name", LOADERS)
def test_other_loaders(name: str, case: str) -> None:
    save, first, rest = CASES[case]
    check_resumed(run_distributed(_interrupted, 2, save, first, rest, LOADERS[name]), save)


def test_each_rank_shuffles_for_itself() -> None:
    """Without a distributed sampler the order comes from each rank's own global generator."""
    options = STEP_BASED | {"use_distributed_sampler": False}
    results = run_distributed(_interrupted_by_rank, 2, ("train_batch_end", 15), options, {})
    check_resumed(results, ("train_batch_end", 15))


def test_accumulation_goes_on_between_two_steps() -> None:
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    results = run_distributed(_interrupted, 2, ("train_batch_end", 4), options, options, {})
    for whole, _, after in results:
        # Step 4 is reached with batch 8, and the save is in the hook of batch 8.
        assert whole["seen"][8:] == after["seen"]
        assert whole["weights"] == after["weights"]


def _interrupted_by_rank(save: tuple[str, int], options: dict[str, Any], loader: dict[str, Any]) -> Any:
    rank = dist.get_rank()
    whole = fit(seed=rank, trainer=dict(options), **loader)
    before = fit(seed=rank, trainer=dict(options), save=save, **loader)
    after = fit(seed=77, trainer=dict(options), ckpt_path="saved.ckpt", **loader)
    return whole, before["seen"][: save[1]], after


def _part(path: str, **options: Any) -> Any:
    run = fit(seed=1, trainer={"max_epochs": 3, "use_distributed_sampler": True}, path=path, **options)
    return run["seen"], run["global_step"]


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3)], ids=str)
def test_another_world_size_finishes_the_epoch_by_the_global_count(worlds: tuple[int, int], tmp_path: Any) -> None:
    before_world, after_world = worlds
    epoch_batches = [-(-SAMPLES // (2 * world)) for world in worlds]
    step = epoch_batches[0] + 3
    path = str(tmp_path / "saved.ckpt")
    before = run_distributed(_part, before_world, path, save=("train_batch_end", step))
    after = run_distributed(_part, after_world, path, ckpt_path=path)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()

    def merged(runs: Any, epoch: int, until: int | None = None) -> list[int]:
        shares = [
            list(itertools.chain.from_iterable(step[2] for step in seen[:until] if step[0] == epoch))
            for seen, _ in runs
        ]
        return [sample for samples in zip(*shares, strict=True) for sample in samples]

    first, rest = merged(before, 1, step), merged(after, 1)
    assert first == order[: 3 * 2 * before_world]
    assert (first + rest)[:SAMPLES] == order
    assert len(first + rest) - SAMPLES < after_world
    # The epoch ends with the number of batches of one at the new world size, and the next one is whole.
    for seen, _ in after:
        assert [batch for epoch, batch, *_ in seen if epoch == 1][-1] == epoch_batches[1] - 1
        assert [batch for epoch, batch, *_ in seen if epoch == 2] == list(range(epoch_batches[1]))
    assert sorted(set(merged(after, 2))) == list(range(SAMPLES))


def _fork() -> list[float]:
    slept: list[float] = []
    let_threads_finish_before_forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network.time, "sleep", slept.append)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return slept


def test_threads_of_the_backend_may_finish_before_a_fork() -> None:
    """Else workers hang now and then: most often in the tests of persistent workers above."""
    once = [network._SECONDS] if sys.version_info < (3, 12) else []
    assert run_distributed(_fork, 2) == [once, once]
