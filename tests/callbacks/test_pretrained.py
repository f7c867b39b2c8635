"""Pretrained weights from safetensors files, into modules that are whole, replicated and sharded."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_shard import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
    full_tensor,
    load_pretrained,
)
from lightning_shard.callbacks.pretrained import PretrainedWeights
from lightning_shard.checkpoint.export import export
from lightning_shard.checkpoint.fit import LoadReport
from lightning_shard.checkpoint.forms import open_any
from lightning_shard.checkpoint.pretrained import fill
from lightning_shard.checkpoint.safetensors import SafetensorsReader
from tests.checkpoint.test_forms import assert_equal, trained  # noqa: F401 a fixture
from tests.checkpoint.test_roundtrip import Net, Rows, build
from tests.harness import run_distributed
from tests.models import quiet_trainer, whole

KINDS = [("plain", 1), ("ddp", 2), ("fsdp-2", 2), ("fsdp-3", 3), ("fsdp-2x1", 2), ("fsdp-offload-2", 2)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """``model.safetensors`` of a `Net`, without the second name of its tied weight."""
    state = {name: tensor.clone() for name, tensor in Net(5).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def split(file: Path, parts: int) -> Path:
    """The same as an index of several files."""
    from safetensors.torch import load_file

    state = list(load_file(file).items())
    weight_map = {}
    for part in range(parts):
        name = f"model-{part}.safetensors"
        mine = dict(state[part::parts])
        save_file(mine, file.parent / name)
        weight_map |= dict.fromkeys(mine, name)
    index = file.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    file.unlink()
    return index


def loaded(path: str, kind: str) -> tuple[dict[str, Tensor], bool, list[float], LoadReport]:
    net, _ = build(kind, 1)
    report = load_pretrained(net, path)
    module = net.module if kind == "ddp" else net
    found = {name: whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return found, module.head.weight is module.embed.weight, found.pop("scratch").tolist(), report


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_every_engine_gets_the_files_values(weights: Path, kind: str, ranks: int) -> None:
    expected = Net(5)
    for found, tied, scratch, report in run_distributed(loaded, ranks, str(weights), kind):
        named = dict(expected.named_parameters()) | dict(expected.named_buffers())
        named.pop("scratch")
        assert_equal(found, {name: tensor.detach() for name, tensor in named.items()})
        assert tied
        assert scratch == [1.0, 1.0], "a buffer that is not persistent is the model's own"
        assert report == LoadReport()


@pytest.mark.parametrize("folder", [False, True])
def test_an_index_of_many_files(weights: Path, folder: bool) -> None:
    index = split(weights, 3)
    net = Net(1)
    load_pretrained(net, weights.parent if folder else index)
    assert_equal(dict(net.state_dict()), dict(Net(5).state_dict()))


def test_an_export_is_loaded(tmp_path: Path, trained: Path) -> None:  # noqa: F811
    export(open_any(trained), tmp_path / "out", max_shard_bytes=100)
    net = Net(1)
    load_pretrained(net, tmp_path / "out")
    assert torch.equal(net.embed.weight, open_any(trained).tensors["model.embed.weight"].read())


def test_values_are_cast_to_the_module(weights: Path) -> None:
    net = Net(1).to(torch.float64)
    load_pretrained(net, weights)
    assert torch.equal(net.embed.weight, Net(5).embed.weight.double())


@pytest.mark.parametrize(
    ("rename", "name"),
    [
        ({"a": "b"}, "b.c.d"),
        ({"a.": "b."}, "b.c.d"),
        ({"": "x"}, "x.a.c.d"),
        ({"": "x", "a.c": "y"}, "y.d"),
        ({"a": ""}, "c.d"),
        ({"a.c.d": "e"}, "e"),
        ({"a.c.d": None}, None),
        ({"a": None, "a.c": "kept"}, "kept.d"),
        ({"a.cc": "b", "c": "b"}, "a.c.d"),
    ],
)
def test_renaming(tmp_path: Path, rename: dict[str, str | None], name: str | None) -> None:
    save_file({"a.c.d": torch.ones(2), "z": torch.zeros(1)}, tmp_path / "w.safetensors")
    module = nn.Module()
    owner = module
    *path, last = (name or "other").split(".")
    for part in path:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(last, nn.Parameter(torch.zeros(2)))
    rest = {"z": None} if name is not None else {"z": "other"}
    if name is None:
        save_file({"a.c.d": torch.ones(2), "z": torch.ones(2)}, tmp_path / "w.safetensors")
    load_pretrained(module, tmp_path / "w.safetensors", rename={**rename, **rest})
    assert next(module.parameters()).tolist() == [1.0, 1.0]


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2), "b.w": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"gives a\.w and b\.w one name, c\.w"):
        load_pretrained(nn.Linear(1, 1), tmp_path / "w.safetensors", rename={"a": "c", "b": "c"})


def test_what_does_not_fit_is_listed_together_and_nothing_changes(weights: Path) -> None:
    net = Net(1)
    net.head = nn.Linear(5, 9)
    net.more = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as raised:
        load_pretrained(net, weights, rename={"body.0": "body.1"})
    for said in (
        r"missing in the files (5): body.0.bias, body.0.weight, head.weight, more.bias, more.weight",
        r"unexpected in the files (2): body.1.bias, body.1.weight",
        r"of another shape (1): head.bias (7,) there, (9,) here",
    ):
        assert said in str(raised.value)
    assert_equal(dict(net.state_dict()), before)
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_pretrained(net, weights, strict=False)
    report = load_pretrained(net, weights, rename={"head": "old"}, strict=False)
    assert report.missing == ("head.weight", "head.bias", "more.weight", "more.bias")
    assert report.unexpected == ("old.bias",)
    assert torch.equal(net.embed.weight, Net(5).embed.weight)
    with pytest.raises(CheckpointMismatchError, match="nothing matches; the module has"):
        load_pretrained(nn.Linear(1, 1), weights, strict=False)


def test_two_values_of_a_tied_weight(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Net(5).state_dict().items()}
    save_file(state, tmp_path / "same.safetensors")
    net = Net(1)
    load_pretrained(net, tmp_path / "same.safetensors")
    assert torch.equal(net.head.weight, state["embed.weight"])
    save_file({**state, "head.weight": state["head.weight"] + 1}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"different values for embed\.weight and head\.weight"):
        load_pretrained(net, tmp_path / "other.safetensors")
    load_pretrained(net, tmp_path / "other.safetensors", rename={"head.weight": None})


def test_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Net(5).state_dict().items() if name != "embed.weight"}
    save_file(state, tmp_path / "w.safetensors")
    net = Net(1)
    load_pretrained(net, tmp_path / "w.safetensors")
    assert torch.equal(net.embed.weight, state["head.weight"])


def test_files_that_are_none(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        load_pretrained(Net(1), tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"has neither model\.safetensors nor"):
        load_pretrained(Net(1), tmp_path / "empty")
    for size in (0, 7, 20, weights.stat().st_size - 1):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(weights.read_bytes()[:size])
        with pytest.raises(CheckpointCorruptError, match=r"cut\.safetensors is no whole safetensors file"):
            load_pretrained(Net(1), cut)
    index = tmp_path / "model.safetensors.index.json"
    for text, said in {
        "{}": "is no index",
        "[": "is no index",
        '{"weight_map": {"a": "../secret"}}': "is not a plain relative path",
        '{"weight_map": {"a": "model.safetensors"}}': "lacks a, which its index says",
    }.items():
        index.write_text(text)
        with pytest.raises(CheckpointCorruptError, match=said):
            load_pretrained(Net(1), index)


def refused(path: str) -> str:
    net, _ = build("fsdp-2", 1)
    if dist.get_rank() == 1:
        path = path + ".elsewhere"
    try:
        load_pretrained(net, path)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_rank_without_the_file_fails_on_all(weights: Path) -> None:
    first, second = run_distributed(refused, 2, str(weights))
    assert first == second
    assert first.startswith("CheckpointNotFoundError: ")
    assert "rank 1: " in first


def fill_rows(path: str) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Into two boxes of rows per rank, as an engine's own partitions are; what was read of the file."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = Rows(torch.zeros(11, 3), 11 * rank // size, 11 * (rank + 1) // size)
    read: list[tuple[int, ...]] = []

    class Noting(SafetensorsReader):
        def read(self, entry: Any, offsets: Any, sizes: Any) -> Tensor:
            read.append(tuple(sizes))
            return super().read(entry, offsets, sizes)

    with Noting() as reader:
        fill({"w": part}, reader.entries(path), reader)
    return torch.cat(list(part.boxes.values())), read


def test_an_object_with_torchs_protocol_is_filled(tmp_path: Path) -> None:
    """And each rank reads its own rows alone."""
    expected = torch.randn(11, 3)
    save_file({"w": expected}, tmp_path / "w.safetensors")
    results = run_distributed(fill_rows, 3, str(tmp_path / "w.safetensors"))
    assert torch.equal(torch.cat([values for values, _ in results]), expected)
    assert sum(size[0] for _, read in results for size in read) == 11


def bytes_of_loading(path: str, kind: str) -> tuple[int, int]:
    """Bytes that this rank asks the file for, and by how much its own memory rises meanwhile."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    read, rises, before = 0, [0], own_memory()

    class Noting(SafetensorsReader):
        def read(self, entry: Any, offsets: Any, sizes: Any) -> Tensor:
            nonlocal read
            box = super().read(entry, offsets, sizes)
            read += box.nbytes
            rises.append(own_memory() - before)
            return box

    with Noting() as reader:
        fill(dict(net.named_parameters()), reader.entries(path), reader)
    assert all(whole(parameter).eq(1).all() for parameter in net.parameters())
    return read, max(rises)


def own_memory() -> int:
    """Bytes of this process that are not a mapped file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_rank_reads_no_more_than_its_slices_and_holds_none(tmp_path: Path) -> None:
    save_file({f"{i}.weight": torch.ones(1024, 1024) for i in range(16)}, tmp_path / "w.safetensors")
    path, size = str(tmp_path / "w.safetensors"), 16 * 2**22
    for kind, share in (("plain", size), ("fsdp", size // 2)):
        for read, rise in run_distributed(bytes_of_loading, 2, path, kind):
            assert read == share
            assert rise < 2**23, "two of the 16 tensors: what a read allocates besides the mapped file"


# Under the Trainer


class Classifier(pl.LightningModule):
    """An encoder that begins with a file's values, on the meta device if asked to, and a new head."""

    def __init__(self, *, meta: bool, weights: str = "") -> None:
        super().__init__()
        self.meta, self.weights = meta, weights
        self.started: dict[str, Tensor] = {}
        self.ended: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "encoder"):
            with torch.device("meta" if self.meta else "cpu"):
                self.encoder = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7))
                self.head = nn.Linear(7, 2)

    def on_fit_start(self) -> None:
        if self.weights:
            load_pretrained(self.encoder, self.weights, rename={"old": "1"})

    def values(self) -> dict[str, Tensor]:
        """What is stepped of each parameter, and the buffers."""
        found = {name: full_tensor(self.trainer, f"encoder.{name}") for name, _ in self.encoder.named_parameters()}
        return found | {name: buffer.clone() for name, buffer in self.encoder.named_buffers()}

    def on_train_start(self) -> None:
        self.started = self.values()

    def on_train_end(self) -> None:
        self.ended = {name: self.values()[name] for name, _ in self.encoder.named_parameters()}

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        if index == 0 and self.global_step == 0:
            weight, bias = (self.started[f"0.{name}"] for name in ("weight", "bias"))
            expected = functional.linear(rows.float(), weight, bias)
            # A sum of four terms of about 1; values of bf16 have 8 bits.
            tolerance = 1e-6 if self.trainer.precision == "32-true" else 2**-5
            assert torch.allclose(self.encoder[0](rows).float(), expected, rtol=tolerance, atol=tolerance)
        return self.head(self.encoder(rows)).square().mean()

    def predict_step(self, rows: Tensor, index: int) -> Tensor:
        return self.encoder(rows).float()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def pretrained_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"0.weight": (7, 3), "0.bias": (7,), "old.weight": (7,), "old.bias": (7,)}
    shapes |= {"old.running_mean": (7,), "old.running_var": (7,)}
    values = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return values | {"old.num_batches_tracked": torch.tensor(7)}


def fit_classifier(strategy: str, precision: str, path: str, callback: bool) -> list[dict[str, Tensor]]:
    """What training began with: in a fit, in a second one, and in one that resumes."""
    data = DataLoader(torch.randn(8, 3), 2)
    module = Classifier(meta=True, weights="" if callback else path)
    callbacks = [PretrainedWeights(path, "encoder", {"old": "1"})] if callback else []

    def trainer(steps: int) -> pl.Trainer:
        return quiet_trainer(strategy=strategy, precision=precision, max_steps=steps, callbacks=callbacks)

    first = trainer(2)
    first.fit(module, data)
    found = [module.started]
    first.save_checkpoint("a.ckpt")
    saved = module.ended
    resumed = Classifier(meta=False, weights=module.weights)
    trainer(3).fit(resumed, data, ckpt_path="a.ckpt")
    assert all(torch.equal(resumed.started[name], tensor) for name, tensor in saved.items()), "the checkpoint wins"
    if callback:
        trainer(1).fit(module, data)
        assert all(torch.equal(module.started[name], tensor) for name, tensor in saved.items()), "trained values stay"
    return found


DEEPSPEED = [
    ("shard_deepspeed_stage_0", "32-true", True),
    ("shard_deepspeed_stage_1", "32-true", True),
    ("shard_deepspeed_stage_1_aligned", "bf16-mixed", False),
    ("shard_deepspeed_stage_2", "bf16-mixed", True),
    ("shard_deepspeed_stage_2_offload", "bf16-mixed", False),
    ("shard_deepspeed_stage_3", "32-true", True),
    ("shard_deepspeed_stage_3_offload", "bf16-mixed", True),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "precision", "callback"),
    [
        ("shard_ddp", "32-true", False),
        ("shard_ddp", "bf16-mixed", True),
        ("shard_fsdp", "32-true", True),
        ("shard_fsdp_hybrid_aligned", "bf16-mixed", False),
        ("shard_fsdp_offload", "32-true", False),
        ("shard_deepspeed_stage_3_aligned", "bf16-mixed", False),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in DEEPSPEED),
    ],
)
def test_training_begins_with_the_unrounded_values(
    tmp_path: Path, strategy: str, precision: str, callback: bool
) -> None:
    expected = pretrained_values()
    path = str(tmp_path / "w.safetensors")
    save_file(expected, path)
    for (started,) in run_distributed(fit_classifier, 2, strategy, precision, path, callback):
        assert_equal(started, {name.replace("old", "1"): tensor for name, tensor in expected.items()})


def predict_with(path: str, name: str) -> Any:
    module = Classifier(meta=False)
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy="shard_fsdp", callbacks=[PretrainedWeights(path, name, {"old": "1"})])
    try:
        (rows,) = trainer.predict(module, DataLoader(torch.ones(2, 3), 1))
    except ConfigurationError as error:
        return str(error)
    return rows


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_on_its_own(tmp_path: Path) -> None:
    values = pretrained_values()
    path = str(tmp_path / "w.safetensors")
    save_file(values, path)
    reference = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7)).eval()
    reference.load_state_dict({name.replace("old", "1"): tensor for name, tensor in values.items()})
    for rows in run_distributed(predict_with, 2, path, "encoder"):
        # One row alone may be summed in another order than by a matrix product of several.
        torch.testing.assert_close(rows, reference(torch.ones(1, 3)).detach(), rtol=1e-6, atol=1e-6)
    for message in run_distributed(predict_with, 2, path, "encoders"):
        assert re.search(
            r"module is 'encoders', which \w*Classifier does not have. Its submodules are encoder", message
        )


class OnMeta(Classifier):
    def configure_model(self) -> None:
        super().configure_model()
        load_pretrained(self.encoder, self.weights, rename={"old": "1"})


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    save_file(pretrained_values(), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"is on the meta device .* in on_fit_start"):
        OnMeta(meta=True, weights=str(tmp_path / "w.safetensors")).configure_model()
    module = OnMeta(meta=False, weights=str(tmp_path / "w.safetensors"))
    module.configure_model()
    assert torch.equal(module.encoder[0].weight, pretrained_values()["0.weight"])


def test_entries_name_their_file(weights: Path) -> None:
    with SafetensorsReader() as reader:
        entry = reader.entries(weights)["embed.weight"]
        assert (entry.file, entry.shape) == (weights, (7, 5))
        with pytest.raises(CheckpointCorruptError, match="can't be read"):
            reader.read(dataclasses.replace(entry, name="nothing"), (0, 0), (7, 5))
