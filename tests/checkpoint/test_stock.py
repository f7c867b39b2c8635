"""What stock Lightning and DeepSpeed wrote, in real processes, goes on under our strategies; and one-file saves."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.collect import OPTIMIZER_STATES
from lightning_shard.checkpoint.forms import is_stock, open_any
from lightning_shard.checkpoint.full import write_full
from lightning_shard.checkpoint.inspect import describe, verify
from lightning_shard.checkpoint.stored import write_portable
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from tests.checkpoint.test_forms import Hostile, assert_equal, nothing_ran, tensors_of  # noqa: F401 a fixture
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole

ROWS = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Odd sizes, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh()) * self.scale + self.shift


class Model(pl.LightningModule):
    """Two parameter groups, in another order than the module's, and a scheduler."""

    def __init__(self, extra: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net: nn.Module = Net()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return (self.net(rows) - rows).square().mean()

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class WrappedModel(Model):
    """Wrapped by itself, since FSDPStrategy's own wrapping needs a GPU; its saving does not."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            super().configure_model()
            host = {"device_id": torch.device("cpu"), "use_orig_params": True}
            frozen = [self.net.scale]
            self.net.first = FullyShardedDataParallel(self.net.first, **host)
            self.net = FullyShardedDataParallel(self.net, ignored_states=frozen, **host)


class HostFSDPStrategy(FSDPStrategy):
    """The Trainer refuses FSDPStrategy itself without a GPU, before it looks at the module."""


def state_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer slots by name, whole."""
    module = trainer.lightning_module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {p: name for name, p in module.named_parameters()}
    for parameter, slots in trainer.optimizers[0].state.items():
        tensors |= {f"{names[parameter]}.{slot}": value for slot, value in slots.items()}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def fit(
    strategy: Any, epochs: int, save: str = "", ckpt_path: str | None = None, module: Any = Model, **kwargs: Any
) -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning)
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, default_root_dir=os.getcwd(), **kwargs)
    trainer.fit(module(), DataLoader(ROWS, 4), ckpt_path=ckpt_path, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    assert not [name for name in os.listdir() if name.startswith(".converted")]
    return trainer


def fit_stock(kind: str, epochs: int, save: str = "", ckpt_path: str | None = None) -> pl.Trainer:
    if kind == "fsdp":
        strategy = HostFSDPStrategy(state_dict_type="sharded")
        return fit(strategy, epochs, save, ckpt_path, WrappedModel)
    return fit("ddp" if dist.get_world_size() > 1 else "auto", epochs, save, ckpt_path)


def save_stock(kind: str, path: str) -> None:
    fit_stock(kind, 2, path)


def stock_throughout(kind: str, path: str) -> dict[str, Tensor]:
    """Four epochs, the last two of them from what the first two saved, as stock Lightning goes on."""
    trainer = fit_stock(kind, 4, ckpt_path=path)
    if kind != "fsdp":
        return state_of(trainer)
    with FullyShardedDataParallel.summon_full_params(trainer.lightning_module):
        clean = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in trainer.lightning_module.named_parameters()}
        return {name: parameter.detach().clone() for name, parameter in clean.items()}


def go_on(strategy: str, path: str) -> tuple[dict[str, Tensor], int, float]:
    trainer = fit(strategy, 4, ckpt_path=path)
    return state_of(trainer), trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stock_checkpoint_goes_on_as_under_stock_lightning(tmp_path: Path, kind: str) -> None:
    """Bitwise: at two processes a sum has one order on every engine."""
    path = str(tmp_path / "stock.ckpt")
    run_distributed(save_stock, 2, kind, path)
    assert is_stock(path)
    expected = run_distributed(stock_throughout, 2, kind, path)[0]
    found = {name: run_distributed(go_on, 2, name, path)[0] for name in ("shard_ddp", "shard_fsdp")}
    for name, (state, steps, rate) in found.items():
        assert (steps, rate) == (32, 0.05 * 0.5**4)
        for key, tensor in expected.items():
            assert torch.equal(state[key], tensor), f"{name}: {key}"
    assert_equal(found["shard_fsdp"][0], found["shard_ddp"][0])
    assert "net.first.weight.exp_avg_sq" in found["shard_ddp"][0]


def validate_stock(path: str) -> dict[str, Tensor]:
    """Weights alone, under another number of processes, in another loop than fit."""

    class Evaluated(Model):
        def test_step(self, rows: Tensor, index: int) -> None:
            self.log("loss", self.training_step(rows, index))

    module = Evaluated()
    quiet_trainer(strategy="shard_fsdp").test(module, DataLoader(ROWS, 4), ckpt_path=path, verbose=False)
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_stock_file_are_evaluated(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    run_distributed(save_stock, 1, "single", path)
    expected = torch.load(path, weights_only=True)["state_dict"]
    found = run_distributed(validate_stock, 2, path)[0]
    assert_equal(found, {name: tensor for name, tensor in expected.items() if name in found})


def refused_elsewhere(path: str) -> str:
    class OneGroup(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.first.parameters())

    try:
        fit("shard_ddp", 4, ckpt_path=path, module=OneGroup)
    except CheckpointMismatchError as error:
        return str(error)
    return "loaded"


@pytest.mark.filterwarnings("ignore")
def test_other_optimizers_than_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    run_distributed(save_stock, 1, "single", path)
    for message in run_distributed(refused_elsewhere, 2, path):
        assert "optimizers that step [4] parameters, here they step [2]" in message


# Saving one file from training


def save_full(strategy: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two epochs with a one-file checkpoint after each, of which the last is kept; then go on from that file."""
    callback = ModelCheckpoint(folder, "{epoch}.full", save_top_k=1, monitor="epoch", mode="max")
    first = fit(strategy, 2, callbacks=[callback], enable_checkpointing=True)
    first.save_checkpoint(f"{folder}/portable.ckpt")
    names = sorted(os.listdir(folder))
    resumed = fit(strategy, 4, ckpt_path=callback.best_model_path)
    return state_of(resumed), state_of(fit(strategy, 4)), names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["shard_ddp", "shard_fsdp"])
def test_a_path_that_ends_in_full_becomes_one_file(tmp_path: Path, strategy: str) -> None:
    for resumed, whole_run, names in run_distributed(save_full, 2, strategy, str(tmp_path)):
        assert names == ["epoch=1.full.ckpt", "portable.ckpt"]
        assert_equal(resumed, whole_run)
    full, portable = tmp_path / "epoch=1.full.ckpt", tmp_path / "portable.ckpt"
    assert_equal(tensors_of(full), tensors_of(portable))
    assert open_any(full).engine == open_any(portable).engine
    found = torch.load(full, weights_only=True)
    assert found["hyper_parameters"] == {"extra": 1.0}
    assert found["pytorch-lightning_version"] == pl.__version__
    assert verify(full) == ["epoch=1.full.ckpt"]


def save_full_in_vain(folder: str) -> tuple[str, list[str]]:
    trainer = fit("shard_fsdp", 1)
    try:
        trainer.save_checkpoint(f"{folder}/taken.full.ckpt")
    except CheckpointError as error:
        return str(error), sorted(os.listdir(folder))
    return "saved", []


@pytest.mark.filterwarnings("ignore")
def test_a_one_file_save_that_fails_fails_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.full.ckpt").mkdir()
    (tmp_path / "taken.full.ckpt" / "mine.txt").write_text("mine")
    first, second = run_distributed(save_full_in_vain, 2, str(tmp_path))
    assert first[0] == second[0]
    assert "taken.full.ckpt is a directory with files that no checkpoint has" in first[0]
    assert os.listdir(tmp_path) == ["taken.full.ckpt"]
    assert os.listdir(tmp_path / "taken.full.ckpt") == ["mine.txt"]


# DeepSpeed


class Tied(nn.Module):
    """Odd sizes, a tie, a frozen parameter, a buffer, one parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.tensor([0.25, 0.5, 0.75]), requires_grad=False)
        self.register_buffer("shift", torch.tensor(2.5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows) + self.tied(rows)) * self.frozen * self.one


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    return [
        {"params": weights, "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if "bias" in n or n == "one"]},
    ]


def forget_groups() -> None:
    """DeepSpeed keeps the groups that it made under an earlier process group, of an earlier call of the harness."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)


def save_deepspeed(stage: int, bf16: bool, path: str, client: dict[str, Any], subgroups: int) -> dict[str, Tensor]:
    """Three steps of plain DeepSpeed; what its own API says the masters and slots are."""
    import deepspeed
    from deepspeed.utils import (
        lazy_init_hp_params_optimizer_state,
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    forget_groups()
    warnings.filterwarnings("ignore")
    module = Tied()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.1)
    zero: dict[str, Any] = {"stage": stage} | ({"sub_group_size": subgroups} if stage == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, lr_scheduler=schedule)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        rows = torch.randn(2, 5, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
        engine.backward(engine(rows).float().square().mean())
        engine.step()
    engine.save_checkpoint(path, client_state=client)
    if stage < 3:
        # DeepSpeed links slots after the first group's first step, when other groups have none yet.
        for group, flat in zip(
            engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.state)
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.0.{name}.{slot}"] = safe_get_full_optimizer_state(parameter, slot)
    return {name: tensor.clone() for name, tensor in found.items()}


def check_deepspeed(tmp_path: Path, stage: int, bf16: bool, ranks: int, subgroups: int = 10**9) -> Path:
    path = tmp_path / f"zero{stage}-{bf16}-{ranks}-{subgroups}"
    client = {"epoch": 3, "mine": {"x": [1, 2]}}
    expected = run_distributed(save_deepspeed, ranks, stage, bf16, str(path), client, subgroups, timeout=300)[0]
    stored = open_any(path)
    found = {key: tensor.read() for key, tensor in stored.tensors.items()}
    for key, tensor in expected.items():
        assert torch.equal(found.pop(key), tensor), key
    steps = {key: found.pop(key) for key in list(found) if key.endswith(".step")}
    assert len(steps) == len(expected) // 3
    assert all(step.item() == 3 for step in steps.values())
    assert found.keys() == {"model.frozen", "model.shift"}
    assert found["model.frozen"].tolist() == [0.25, 0.5, 0.75]
    assert found["model.shift"].item() == 2.5
    assert stored.aliases == {"model.tied.weight": "model.first.weight"}
    assert (stored.world_size, stored.engine) == (ranks, f"DeepSpeed ZeRO-{stage}")
    (described,) = stored.trainer_state[OPTIMIZER_STATES]
    weights, rest = described["groups"]
    assert sorted(weights["params"]) == ["first.weight", "second.weight"]
    assert sorted(rest["params"]) == ["first.bias", "one", "tied.bias"]
    assert (weights["weight_decay"], rest["weight_decay"], rest["lr"]) == (0.3, 0.01, 0.1 * 0.5**3)
    assert (stored.trainer_state["epoch"], stored.trainer_state["mine"]) == (3, {"x": [1, 2]})
    assert "model.first.weight" in describe(path, stored)
    return path


class FromDeepSpeed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.started: dict[str, Tensor] = {}
        for name, child in Tied().named_children():
            self.add_module(name, child)
        whole = Tied()
        self.one, self.frozen = whole.one, whole.frozen
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.tensor(0.0))

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return Tied.forward(self, rows).square().mean()

    def on_train_start(self) -> None:
        self.started = state_of(self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(groups_of(self), lr=9.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def start_from_deepspeed(path: str) -> tuple[dict[str, Tensor], float]:
    trainer = fit("shard_fsdp", 1, ckpt_path=path, module=FromDeepSpeed, max_steps=1)
    return trainer.lightning_module.started, trainer.lr_scheduler_configs[0].scheduler.last_epoch


@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (2, False), (3, False), (3, True)])
def test_deepspeed_partitions_become_whole_tensors(tmp_path: Path, stage: int, bf16: bool) -> None:
    path = check_deepspeed(tmp_path, stage, bf16, 2)
    if (stage, bf16) != (3, True):
        return
    started, last_epoch = run_distributed(start_from_deepspeed, 2, str(path))[0]
    assert last_epoch == 3, "the checkpoint's scheduler; one step ends no epoch"
    for key, tensor in open_any(path).tensors.items():
        name = key.removeprefix("model.").removeprefix("optimizer.0.")
        assert torch.equal(started[name], tensor.read().to(started[name].dtype)), key


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("stage", "subgroups"), [(1, 10**9), (2, 10**9), (3, 10**9), (3, 20)])
def test_deepspeed_partitions_of_any_number_of_ranks(
    tmp_path: Path, stage: int, bf16: bool, ranks: int, subgroups: int
) -> None:
    check_deepspeed(tmp_path, stage, bf16, ranks, subgroups)


# Nothing in a stock checkpoint runs


def hostile_file(path: Path) -> None:
    torch.save({"x": Hostile()}, path)


@pytest.fixture(scope="module")
def stock_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fsdp``, ``zero2`` and ``zero3``."""
    folder = tmp_path_factory.mktemp("stock")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_distributed(save_stock, 2, "fsdp", str(folder / "fsdp"))
        for stage in (2, 3):
            run_distributed(save_deepspeed, 2, stage, False, str(folder / f"zero{stage}"), {}, 10**9, timeout=300)
    return folder


def test_hostile_stock_directories(tmp_path: Path, stock_folders: Path) -> None:
    cases = {
        "fsdp/meta.pt": "fsdp",
        "zero2/global_step3/mp_rank_00_model_states.pt": "zero2",
        "zero2/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt": "zero2",
        "zero3/global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt": "zero3",
    }
    for number, (file, folder) in enumerate(cases.items()):
        copy = tmp_path / str(number)
        shutil.copytree(stock_folders / folder, copy / folder)
        open_any(copy / folder)
        hostile_file(copy / file)
        named = rf"{re.escape(Path(file).name)} names tests\.checkpoint\.hostile\.ran.*nothing in it ran"
        with pytest.raises(CheckpointCorruptError, match=named):
            open_any(copy / folder)


def test_hostile_stock_fsdp_metadata_and_items(tmp_path: Path, stock_folders: Path) -> None:
    path = tmp_path / "fsdp"
    shutil.copytree(stock_folders / "fsdp", path)
    original = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata: it names tests\.checkpoint\.hostile\.ran"):
        open_any(path)

    metadata = pickle.loads(original)
    key = "optimizer_0.param_groups.0.lr"
    place = metadata.storage_data[MetadataIndex(key)]
    stream = io.BytesIO()
    torch.save(Hostile(), stream)
    with open(path / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), len(stream.getvalue())
        file.write(stream.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match=rf"{re.escape(key)}: .*names tests\.checkpoint\.hostile\.ran"):
        open_any(path)

    for changed, said in {"../x.distcp": "not a plain relative path", "other.distcp": "does not list"}.items():
        place.relative_path = changed
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointCorruptError, match=said):
            open_any(path)


def test_deepspeed_directories_that_can_not_be_read(tmp_path: Path, stock_folders: Path) -> None:
    path = tmp_path / "zero2"
    shutil.copytree(stock_folders / "zero2", path)
    (path / "latest").write_text("../zero2/global_step3")
    with pytest.raises(CheckpointCorruptError, match="not a plain relative path"):
        open_any(path)
    (path / "latest").write_text("global_step3")
    states = path / "global_step3"
    (states / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"has the files of 1 ranks, but .*2, 2"):
        open_any(path)
    (states / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no file \*_optim_states\.pt.*stage 0"):
        open_any(path)
    shutil.copy(states / "mp_rank_00_model_states.pt", states / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="model, pipeline or expert parallelism"):
        open_any(path)


def test_a_converted_directory_is_complete(tmp_path: Path, stock_folders: Path) -> None:
    for name in ("fsdp", "zero2", "zero3"):
        write_portable(tmp_path / name, open_any(stock_folders / name))
        assert_equal(tensors_of(tmp_path / name), tensors_of(stock_folders / name))
        assert verify(tmp_path / name)
        write_full(tmp_path / f"{name}.ckpt", open_any(stock_folders / name))
        assert_equal(tensors_of(tmp_path / f"{name}.ckpt"), tensors_of(stock_folders / name))
        with pytest.raises(CheckpointError, match="has no checksums: convert it"):
            verify(stock_folders / name)
