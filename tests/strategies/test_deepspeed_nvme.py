"""ZeRO-Infinity: masters, slots and parameters in files, and the numbers, checkpoints and modules of the other engines.

DeepSpeed puts into files what takes 1 MiB and more per rank, so that the models here are large enough for that.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import EMACallback, ShardFSDPStrategy, ShardPrecision, full_tensor, set_full_tensor
from lightning_shard.engines.zero import swapping
from lightning_shard.engines.zero.config.fields import OptimizerOffload, ParameterOffload, Stage3Options
from lightning_shard.errors import ConfigurationError
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from lightning_shard.strategies.strategy import ShardStrategy
from tests.compiled import NVME, need
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import Final, TinyLM, loader, quiet_trainer
from tests.strategies.engines import differences
from tests.strategies.zero import Start

STEPS = 5
SAVED = 3
NORM = {"gradient_clip_val": 0.05}
VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}

# 316000 elements per rank at 2 processes: one sub-group of more than 1 MiB of fp32, and with a limit of 270000
# elements a second one, which is small and stays in memory.
DEEP = {"width": 160, "depth": 4}
# Two matrices of 526000 elements per rank: more than 1 MiB in bf16.
WIDE = {"width": 592, "depth": 1}


def strategy_of(engine: str, folder: str = "swap") -> ShardStrategy:
    if engine == "full":
        return ShardFSDPStrategy(aligned=True)
    files: dict[str, Any] = {"device": "nvme", "nvme_path": folder}
    if engine == "all":
        # The copies that a save in the background writes from are in files too.
        more: dict[str, Any] = {"offload_parameters": ParameterOffload(max_in_cpu=0, **files), "async_save": True}
    else:  # Masters and two slots are more than two buffers.
        files |= {"buffer_count": 2} if engine == "few_buffers" else {}
        more = {"stage3": Stage3Options(sub_group_size=270_000)}
    offload = OptimizerOffload(**files)
    return ShardDeepSpeedStrategy(aligned=True, hooks_use_accessor=True, stage=3, offload_optimizer=offload, **more)


class Adapted(TinyLM):
    """A large matrix is frozen, and so in a file without a master."""

    def configure_model(self) -> None:
        super().configure_model()
        self.blocks[0].up.weight.requires_grad_(False)


class Watch(pl.Callback):
    """Keeps the norms and the largest gradients, and counts parts in files while a fit runs."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.largest: list[float] = []
        self.in_files = (0, 0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.largest.append(max(full_tensor(trainer, name, "gradient").abs().max().item() for name in names))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if "grad_norm" in trainer.callback_metrics:
            self.norms.append(trainer.callback_metrics["grad_norm"].item())
        if isinstance(trainer.strategy, ShardDeepSpeedStrategy):
            groups = list(swapping.swapped_groups(trainer.strategy.engine._stepping.running.zero))
            shards = [p.ds_tensor for p in module.parameters()]
            self.in_files = len(groups), sum(shard.final_location == swapping.IN_FILES for shard in shards)


def fit(
    engine: str,
    model: dict[str, Any],
    *,
    precision: str = "32-true",
    steps: int = STEPS,
    save: str | None = None,
    resume: str | None = None,
    swap: str = "swap",
    kind: type[TinyLM] = TinyLM,
    callback: pl.Callback | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """One run, with its full parameters and optimizer state."""
    pl.seed_everything(1, verbose=False)
    module, watch, final = kind(lr=1e-3, **model), Watch(), Final()
    callbacks = [watch, final, *([callback] if callback else [])]
    if save is not None:
        callbacks.append(ModelCheckpoint(dirpath=save, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1))
    trainer = quiet_trainer(
        strategy=strategy_of(engine, swap),
        plugins=[ShardPrecision(precision)],
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=save is not None,
        **kwargs,
    )
    trainer.fit(module, loader(), ckpt_path=resume)
    trainer.strategy.barrier()
    return {
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "losses": module.losses,
        "norms": watch.norms,
        "largest": watch.largest,
        "in_files": watch.in_files,
        "left": sorted(str(path) for path in Path(swap).rglob("*")) if engine != "full" else [],
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any], *, since: int = 0) -> None:
    for part in ("parameters", "optimizer"):
        assert differences(one[part], other[part]) == {}, part
    assert all(value.dtype == torch.float32 for value in {**one["parameters"], **one["optimizer"]}.values())
    for part in ("losses", "norms", "largest"):
        assert one[part][since:] == other[part], part


def compare(engine: str, model: dict[str, Any], **kwargs: Any) -> None:
    runs = {name: fit(name, model, **kwargs) for name in ("full", engine)}
    # A sub-group, and the two matrices; everything else is smaller than 1 MiB.
    assert runs[engine]["in_files"] == (1, 2 if engine == "all" else 0)
    assert runs[engine]["left"] == []
    if kwargs.get("gradient_clip_algorithm") == "value":
        assert min(runs["full"]["largest"]) > kwargs["gradient_clip_val"]
    elif "gradient_clip_val" in kwargs:
        assert min(runs["full"]["norms"]) > kwargs["gradient_clip_val"]
    assert_equal(runs["full"], runs[engine])


@pytest.fixture(scope="module", autouse=True)
def _needs_kernel(request: pytest.FixtureRequest) -> None:
    need(request, *NVME)


def parity(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    for engine, model, kwargs in cases:
        compare(engine, model, **kwargs)


SHORT = [
    ("state", DEEP, {"steps": 4, **NORM}),
    ("all", WIDE, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "steps": 4, **NORM}),
    ("few_buffers", DEEP, {"steps": 4}),
]
LONG = [
    (engine, model, {"precision": precision, "steps": 20, "accumulate_grad_batches": twice, **clip})
    for engine, model in (("state", DEEP), ("all", WIDE))
    for precision, clip, twice in (("32-true", {}, 2), ("bf16-mixed", NORM, 1), ("16-mixed", VALUE, 2))
]


@pytest.mark.parametrize("cases", sampled([SHORT, LONG], 0), ids=["short", "long"])
def test_files_give_the_numbers_of_fsdp(cases: list[Any]) -> None:
    run_distributed(parity, 2, cases, timeout=600)


def resumes(precision: str, folder: str) -> None:
    """The checkpoint of each of two engines goes on under the other and under itself."""
    settings: dict[str, Any] = {"precision": precision, "kind": Adapted, **NORM}
    runs = {engine: fit(engine, WIDE, save=f"{folder}/{engine}", **settings) for engine in ("full", "all")}
    assert runs["all"]["in_files"] == (1, 2)
    assert_equal(runs["full"], runs["all"])
    assert not any(key.startswith("blocks.0.up.weight") for key in runs["all"]["optimizer"])
    losses = []
    for writer, reader in (("all", "all"), ("all", "full"), ("full", "all")):
        path = f"{folder}/{writer}/step={SAVED}.ckpt"
        assert_equal(runs[writer], fit(reader, WIDE, resume=path, **settings), since=SAVED)
        trainer = quiet_trainer(strategy=strategy_of(reader), plugins=[ShardPrecision(precision)])
        data = loader(count=16, shuffle=False)
        [result] = trainer.validate(Adapted(**WIDE, seed=8), data, ckpt_path=path, verbose=False)
        losses.append(result["val_loss"])
    assert losses == losses[:1] * 3


@pytest.mark.parametrize("precision", sampled(["bf16-mixed", "32-true", "16-mixed"], 0))
def test_a_checkpoint_from_files_goes_on_with_fsdp_and_back(tmp_path: Path, precision: str) -> None:
    run_distributed(resumes, 2, precision, str(tmp_path), timeout=600)


class Change(pl.Callback):
    """Sets a parameter, a slot and a gradient that are in files."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            for kind, factor in (("gradient", 0.5), ("exp_avg", 2.0), ("parameter", -1.0)):
                value = full_tensor(trainer, "blocks.0.up.weight", kind)
                set_full_tensor(trainer, "blocks.0.up.weight", factor * value, kind)
                assert torch.equal(full_tensor(trainer, "blocks.0.up.weight", kind), factor * value)


def change_in_both() -> None:
    runs = [fit(engine, WIDE, precision="bf16-mixed", steps=3, callback=Change()) for engine in ("full", "all")]
    assert_equal(*runs)


def test_full_tensors_in_files_are_read_and_changed() -> None:
    run_distributed(change_in_both, 2)


def one_module_after_the_other() -> None:
    pl.seed_everything(1, verbose=False)
    module = TinyLM(lr=1e-3, **WIDE)
    masters, losses = [], []
    for engine in ("all", "all", "state"):
        # The second and third run begin with pieces whose files are gone by name.
        start, final = Start(), Final()
        callbacks = [start, final]
        trainer = quiet_trainer(strategy=strategy_of(engine), precision="bf16-mixed", max_steps=2, callbacks=callbacks)
        trainer.fit(module, loader())
        masters.append((start.parameters, final.parameters))
        evaluation = quiet_trainer(strategy=strategy_of("all"), precision="bf16-mixed")
        losses.append(evaluation.validate(module, loader(count=16, shuffle=False), verbose=False)[0]["val_loss"])
        predicted = evaluation.predict(module, loader(count=16, shuffle=False))
        assert sum(len(batch) for batch in predicted) == 8
        trainer.strategy.barrier()
        assert list(Path("swap").iterdir()) == []
    for (_, before), (first, last) in itertools.pairwise(masters):
        assert differences(before, first) == {}
        assert len(differences(first, last)) > 0
    assert len(set(losses)) == len(losses)


def test_a_module_goes_on_after_its_files_are_removed() -> None:
    run_distributed(one_module_after_the_other, 2)


def side_by_side() -> None:
    """A run in the folder of another one takes the steps of a run alone."""
    alone = fit("all", WIDE, steps=2, swap="alone")
    Path("swap/lightning_shard-other/zero_stage_3/optimizer/rank0").mkdir(parents=True, exist_ok=True)
    other = Path("swap/lightning_shard-other/zero_stage_3/optimizer/rank0/0_5.tensor.swp")
    other.write_bytes(b"another run's")
    assert differences(alone["parameters"], fit("all", WIDE, steps=2)["parameters"]) == {}
    assert [path.name for path in Path("swap").iterdir()] == ["lightning_shard-other"]
    assert other.read_bytes() == b"another run's"


def test_runs_in_one_folder_do_not_touch_each_other() -> None:
    run_distributed(side_by_side, 2)


def unwritable() -> str:
    if torch.distributed.get_rank() == 1:
        Path("a_file").write_text("no directory")
    torch.distributed.barrier()
    module = TinyLM(**WIDE)
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(strategy=strategy_of("all", "a_file"), max_steps=1).fit(module, loader())
    # Nothing was cut.
    assert all(not hasattr(p, "ds_tensor") for p in module.parameters())
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks() -> None:
    first, second = run_distributed(unwritable, 2)
    assert first == second
    assert "a_file', but files can't be written there" in first


def averaged() -> None:
    trainer = quiet_trainer(strategy=strategy_of("state"), max_steps=1, callbacks=[EMACallback()])
    with pytest.raises(ConfigurationError, match="EMACallback averages the masters in every step"):
        trainer.fit(TinyLM(**DEEP), loader())


def test_averages_of_state_in_files_are_refused() -> None:
    run_distributed(averaged, 2)
