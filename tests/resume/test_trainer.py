"""Interrupted and uninterrupted training under Lightning's Trainer see the same samples and random numbers.

With a strategy that does no more than any strategy has to do for it.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_shard.cluster import forking
from lightning_shard.cluster.forking import let_threads_finish_before_forks
from lightning_shard.errors import DataError
from lightning_shard.ranks import Ranks
from lightning_shard.resume import (
    agreeing,
    check_lengths,
    place_batches,
    prepare_loader,
    rng_state,
    seed_rng,
    set_rng_state,
    states_of_rank,
)
from tests.harness import run_distributed

SAMPLES = 22


class ResumingStrategy(DDPStrategy):
    """DDP, with what a strategy must do for resume: the reference for every other one."""

    rng: Any = None

    def setup_environment(self) -> None:
        super().setup_environment()
        let_threads_finish_before_forks()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        loader = prepare_loader(trainer.fit_loop, dataloader, world_size=self.world_size, rank=self.global_rank)
        length = sized_len(loader)
        check_lengths(length)
        return agreeing(loader) if length is None else loader

    def on_train_start(self) -> None:
        place_batches(self.lightning_module.trainer.fit_loop)
        if self.rng is not None:
            set_rng_state(self.rng)
            self.rng = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        state["combined_loader"] = Ranks.of().gather(state.get("combined_loader", []))
        checkpoint["rng"] = Ranks.of().gather(rng_state())
        super().save_checkpoint(checkpoint, filepath, storage_options)
        dist.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        state["combined_loader"] = states_of_rank(state["combined_loader"], self.global_rank)
        self.rng = states_of_rank(checkpoint["rng"], self.global_rank)
        return checkpoint


class Indices(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Recorder(pl.LightningModule):
    """Notes what each step gets: epoch, batch index, samples, a random number, the length of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.epochs_begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs_begun.append(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.rand(())
        self.seen.append((self.current_epoch, batch_idx, batch.tolist(), noise.item()))
        return self.layer(batch.float().view(-1, 1) / SAMPLES + noise).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        torch.rand(())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Saver(pl.Callback):
    """Saves at one step, in one hook."""

    def __init__(self, hook: str, step: int, path: str) -> None:
        self.hook, self.step, self.path = hook, step, path
        self.saved = False

    def _save(self, hook: str, trainer: pl.Trainer) -> None:
        if hook == self.hook and trainer.global_step == self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._save("train_batch_end", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._save("validation_end", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save("train_epoch_end", trainer)


def fit(
    *,
    ckpt_path: str | None = None,
    save: tuple[str, int] | None = None,
    seed: int,
    trainer: dict[str, Any],
    path: str = "saved.ckpt",
    dataset: Any = None,
    **loader: Any,
) -> dict[str, Any]:
    seed_rng(seed)
    module = Recorder()
    validation = trainer.pop("validation", False)
    run = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ResumingStrategy(),
        callbacks=[Saver(*save, path)] if save else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **({} if validation else {"limit_val_batches": 0}),
        **trainer,
    )
    training = DataLoader(dataset or Indices(), **({"batch_size": 2, "shuffle": True} | loader))
    run.fit(module, training, DataLoader(Indices(), 8) if validation else None, ckpt_path=ckpt_path)
    if save and save[0] == "end":
        run.save_checkpoint(path)
    return {
        "seen": module.seen,
        "weights": [parameter.tolist() for parameter in module.parameters()],
        "global_step": run.global_step,
        "epochs_begun": module.epochs_begun,
        "epoch": run.current_epoch,
    }


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


def _check(results: Any, save: tuple[str, int]) -> None:
    for whole, before, after in results:
        assert len(before) == save[1] or save[0] == "end"
        assert before + after["seen"] == whole["seen"]
        assert after["weights"] == whole["weights"]
        assert after["global_step"] == whole["global_step"]
        assert after["epoch"] == whole["epoch"]
    first, second = ([step[2] for step in whole["seen"]] for whole, _, _ in results)
    assert first != second, "both ranks saw the same batches"


# With workers the order is theirs to prefetch; what the trainer's counters do is the same.
WITH_WORKERS = [
    pytest.param(case, 2, marks=[] if case in ("mid-epoch", "epoch end, steps") else pytest.mark.matrix)
    for case in CASES
]


@pytest.mark.parametrize(("case", "workers"), [*((case, 0) for case in CASES), *WITH_WORKERS])
def test_resumed_is_uninterrupted(case: str, workers: int) -> None:
    save, first, rest = CASES[case]
    results = run_distributed(_interrupted, 2, save, first, rest, {"num_workers": workers})
    _check(results, save)


LOADERS = {
    "persistent workers": {"num_workers": 1, "persistent_workers": True},
    "unshuffled, larger batches": {"shuffle": False, "batch_size": 3},
    "own generator": {"generator": torch.Generator().manual_seed(2), "num_workers": 2},
    "own sampler": {"shuffle": False, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, 24)},
    "dropped tail": {"drop_last": True, "batch_size": 4},
}


@pytest.mark.parametrize("case", ["mid-epoch, steps", "epoch end, steps", "after fit"])
@pytest.mark.parametrize("name", LOADERS)
def test_other_loaders(name: str, case: str) -> None:
    save, first, rest = CASES[case]
    _check(run_distributed(_interrupted, 2, save, first, rest, LOADERS[name]), save)


def test_each_rank_shuffles_for_itself() -> None:
    """Without a distributed sampler the order comes from each rank's own global generator."""
    options = STEP_BASED | {"use_distributed_sampler": False}
    results = run_distributed(_interrupted_by_rank, 2, ("train_batch_end", 15), options, {})
    _check(results, ("train_batch_end", 15))


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
    _check(run_distributed(_stream, 2, save, options), save)


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


def _fork() -> list[float]:
    slept: list[float] = []
    let_threads_finish_before_forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forking.time, "sleep", slept.append)
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return slept


def test_threads_of_the_backend_may_finish_before_a_fork() -> None:
    """Else workers hang now and then: most often in the tests of persistent workers above."""
    once = [forking._SECONDS] if sys.version_info < (3, 12) else []
    assert run_distributed(_fork, 2) == [once, once]
