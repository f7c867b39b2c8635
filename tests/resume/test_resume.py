"""A run that was interrupted and resumed is bitwise the run that never stopped, under whatever engine it goes on."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import full_tensor
from lightning_shard.errors import CheckpointError, DataError
from tests.groups import sampled
from tests.harness import DistributedError, run_distributed
from tests.models import Final, TinyLM, Tokens, loader, quiet_trainer

STEPS = 14
EPOCH = 8  # batches per rank at 2 processes: 64 samples in batches of 4
ENGINES = ["shard_ddp_aligned", "shard_fsdp_aligned", "shard_fsdp_hybrid_aligned"]


def _fit(
    strategy: Any,
    *,
    folder: str | None = None,
    resume: str | None = None,
    steps: int = STEPS,
    batch_size: int = 4,
    precision: Any = "32-true",
    every: int | None = 3,
    **kwargs: Any,
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = TinyLM(dropout=0.1), Final()
    callbacks: list[pl.Callback] = [final, *kwargs.pop("callbacks", [])]
    if folder is not None:
        callbacks.append(
            ModelCheckpoint(
                dirpath=folder,
                filename="{step}",
                every_n_train_steps=every,
                every_n_epochs=None if every else 1,
                save_top_k=-1,
            )
        )
    trainer = quiet_trainer(
        strategy=strategy,
        max_steps=steps,
        precision=precision,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        **kwargs,
    )
    trainer.fit(module, loader(batch_size, count=64), loader(4, count=16, shuffle=False), ckpt_path=resume)
    optimizer = trainer.optimizers[0]
    return {
        "parameters": final.parameters,
        "slots": final.optimizer,
        "lr": optimizer.param_groups[0]["lr"],
        "losses": module.losses,
        "seen": module.seen,
        "rng": torch.get_rng_state(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def _assert_continues(straight: list[dict[str, Any]], resumed: list[dict[str, Any]], since: int) -> None:
    for whole_run, rest in zip(straight, resumed, strict=True):
        assert rest["seen"] == whole_run["seen"][since:]
        assert rest["losses"] == whole_run["losses"][since:]
        for name, value in whole_run["parameters"].items():
            assert torch.equal(value, rest["parameters"][name]), name
        assert whole_run["slots"].keys() == rest["slots"].keys() != set()
        for key, value in whole_run["slots"].items():
            assert torch.equal(value, rest["slots"][key]), key
        assert torch.equal(whole_run["rng"], rest["rng"])
        for key in ("lr", "metrics", "step", "epoch"):
            assert rest[key] == whole_run[key], key


@pytest.mark.parametrize("precision", sampled(["32-true", "bf16-mixed"], 1))
def test_resume_in_mid_epoch_under_every_engine(tmp_path: Path, precision: str) -> None:
    straight = {}
    for name in ENGINES:
        straight[name] = run_distributed(_fit, 2, name, folder=str(tmp_path / name), precision=precision)
        assert straight[name][0]["seen"] != straight[name][1]["seen"]
        _assert_continues(straight[ENGINES[0]], straight[name], 0)
    # Step 6 lies in the first epoch of 8 steps, step 9 in the second; dropout draws from every rank's generator.
    for writer, reader, step in [(0, 1, 6), (1, 2, 9), (2, 0, 3)]:
        checkpoint = tmp_path / ENGINES[writer] / f"step={step}.ckpt"
        resumed = run_distributed(_fit, 2, ENGINES[reader], resume=str(checkpoint), precision=precision)
        _assert_continues(straight[ENGINES[writer]], resumed, step)


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.matrix)])
def test_ddp_sums_in_the_same_order_after_a_resume(tmp_path: Path, ranks: int) -> None:
    # The sum of two numbers has one order; of three it has several.
    straight = run_distributed(_fit, ranks, "shard_ddp", folder=str(tmp_path), steps=5)
    resumed = run_distributed(_fit, ranks, "shard_ddp", resume=str(tmp_path / "step=3.ckpt"), steps=5)
    _assert_continues(straight, resumed, 3)


def test_another_world_size_goes_on_after_the_last_sample(tmp_path: Path) -> None:
    # One epoch; the same global batch of 8 at both sizes, so the same samples must be used in the same steps.
    straight = run_distributed(_fit, 2, "shard_fsdp_aligned", folder=str(tmp_path), steps=EPOCH)
    alone = run_distributed(
        _fit, 1, "shard_ddp_aligned", resume=str(tmp_path / "step=3.ckpt"), steps=EPOCH, batch_size=8
    )
    sums = [a + b for a, b in zip(straight[0]["seen"], straight[1]["seen"], strict=True)]
    assert alone[0]["seen"] == sums[3:]
    assert alone[0]["step"] == EPOCH


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    "strategy", ["shard_fsdp", "shard_fsdp_grad_op", *(f"shard_deepspeed_stage_{stage}" for stage in range(4))]
)
def test_resume_on_more_ranks_under_every_engine(strategy: str, ranks: int, tmp_path: Path) -> None:
    straight = run_distributed(_fit, ranks, strategy, folder=str(tmp_path), steps=5)
    resumed = run_distributed(_fit, ranks, strategy, resume=str(tmp_path / "step=3.ckpt"), steps=5)
    _assert_continues(straight, resumed, 3)


class _Stream(IterableDataset[Any]):
    """Ends after a number of batches that depends on the rank."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        data = Tokens(64)
        rank = torch.distributed.get_rank()
        for index in range(4 * self.sizes[rank]):
            yield data[(2 * index + rank) % 64]


def _fit_uneven(strategy: str, sizes: list[int], *, sized: bool) -> tuple[int, list[str]]:
    module = TinyLM()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    data: Any = DataLoader(_Stream(sizes), batch_size=4)
    if sized:
        data = loader(4, count=4 * sizes[torch.distributed.get_rank()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    return trainer.global_step, [str(w.message) for w in caught if "ran out" in str(w.message)]


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp"], 1))
def test_uneven_data_ends_together_and_names_the_rank(strategy: str) -> None:
    results = run_distributed(_fit_uneven, 2, strategy, [5, 3], sized=False, timeout=60)
    assert [step for step, _ in results] == [3, 3]
    assert any("rank 1" in message for message in results[0][1])

    with pytest.raises(DistributedError) as error:
        run_distributed(_fit_uneven, 2, strategy, [5, 3], sized=True, timeout=60)
    assert set(error.value.failed.values()) == {DataError.__name__}
    assert "rank 1: 3" in str(error.value)


class _Adapters(TinyLM):
    """Saves without its embedding, as LoRA users leave the frozen base out."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["embed.weight"]
        checkpoint["note"] = "mine"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class _Replacing(TinyLM):
    """What it puts into the place of a tensor is another object, with its values or with others."""

    added = 0.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["state_dict"]["head.weight"]
        if isinstance(weight, torch.Tensor):
            checkpoint["state_dict"]["head.weight"] = weight.detach().clone() + self.added
        elif self.added:
            checkpoint["state_dict"]["head.weight"] = torch.zeros(())


def _save_replaced(strategy: str, path: str) -> None:
    module = _Replacing()
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    module.added = float(trainer.global_rank == 0)
    with pytest.raises(CheckpointError, match=r"on_save_checkpoint added or replaced head\.weight in the state_dict"):
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_3"], 1))
def test_what_on_save_checkpoint_replaces_is_refused_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    run_distributed(_save_replaced, 2, strategy, str(tmp_path / "a.ckpt"))


class _Filtered(TinyLM):
    """Its state_dict() has no embedding, and takes no arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict().items() if not name.startswith("embed.")}


def _resumed_without(strategy: str) -> list[tuple[list[str], bool, list[str]]]:
    from lightning_shard.checkpoint.files.manifest import read_manifest

    found = []
    for kind in (_Filtered, _Adapters):
        path = f"{kind.__name__}.ckpt"
        trainer = quiet_trainer(strategy=strategy, max_steps=2)
        trainer.fit(module := kind(), loader())
        trainer.save_checkpoint(path)
        head, embed = (full_tensor(trainer, name) for name in ("head.weight", "embed.weight"))
        again = kind(seed=8)
        trainer = quiet_trainer(strategy=strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.validate(again, loader(count=8, shuffle=False), ckpt_path=path, verbose=False)
        assert getattr(again, "note", "mine") == "mine"
        same = torch.equal(full_tensor(trainer, "head.weight"), head)
        other = torch.equal(full_tensor(trainer, "embed.weight"), embed)
        said = [str(w.message) for w in caught if "these keep their values (1): model.embed.weight." in str(w.message)]
        found.append((sorted(read_manifest(path).tensors), same and not other, said))
    quiet_trainer(strategy=strategy, max_steps=3).fit(module, loader(), ckpt_path=path)
    return found


@pytest.mark.parametrize("strategy", sampled(["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_3"], 1))
def test_tensors_that_the_modules_own_code_leaves_out_are_left_out(strategy: str) -> None:
    for rank, found in enumerate(run_distributed(_resumed_without, 2, strategy)):
        for keys, right, said in found:
            assert "model.embed.weight" not in keys
            assert {"model.head.weight", "optimizer.0.embed.weight.exp_avg"} <= set(keys)
            assert right
            assert len(said) == (rank == 0)


def _epoch_withother_batches(strategy: str) -> list[int]:
    """Samples of an epoch that is begun in batches of 2 and finished in batches of 3 after a resume."""
    seen: list[int] = []

    class Note(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, _: int) -> None:
            seen.extend(batch[0][:, 0].tolist())

    data = [(torch.full((4,), i), torch.full((4,), i)) for i in range(16)]
    for size, steps, path in ((2, 3, None), (3, -1, "half.ckpt")):
        options = {"max_steps": steps, "max_epochs": 1, "callbacks": [Note()]}
        trainer = quiet_trainer(strategy=strategy, **options)
        said = "A step took 2 samples before .* and takes 3 now .* No accumulate_grad_batches keeps it"
        with pytest.warns(UserWarning, match=said) if path else nullcontext():
            trainer.fit(TinyLM(), DataLoader(data, batch_size=size), ckpt_path=path)
        trainer.save_checkpoint("half.ckpt")
    return seen


def test_an_epoch_is_finished_in_batches_of_another_size() -> None:
    assert run_distributed(_epoch_withother_batches, 1, "shard_ddp") == [list(range(16))]
