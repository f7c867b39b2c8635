"""Pretrained weights from safetensors files, into modules that are on one device, replicated and sharded."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    load_pretrained,
)
from lightning_shard.checkpoint.files.tensor_files import fill
from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.foreign.pretrained_weights import SafetensorsReader
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.compare import assert_equal
from tests.checkpoint.nets import Net, Rows, build
from tests.harness import run_distributed
from tests.models import whole

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


def test_an_export_is_loaded(tmp_path: Path, trained: Path) -> None:
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
        "of another shape (1): head.bias (7,) there, (9,) here",
    ):
        assert said in str(raised.value)
    assert_equal(dict(net.state_dict()), before)
    with pytest.raises(CheckpointMismatchError, match="of another shape"):
        load_pretrained(net, weights, strict=False)
    report = load_pretrained(net, weights, rename={"head": "old"}, strict=False)
    assert report.missing == ("head.weight", "head.bias", "more.weight", "more.bias")
    assert report.unexpected == ("old.bias",)
    assert torch.equal(net.embed.weight, Net(5).embed.weight)
    with pytest.raises(CheckpointMismatchError, match=r"nothing in .* matches the model by name"):
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
        fill("w", part, partial(reader.read, reader.entries(path)["w"]))
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
        entries = reader.entries(path)
        for name, parameter in net.named_parameters():
            fill(name, parameter, partial(reader.read, entries[name]))
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


def test_entries_name_their_file(weights: Path) -> None:
    with SafetensorsReader() as reader:
        entry = reader.entries(weights)["embed.weight"]
        assert (entry.file, entry.shape) == (weights, (7, 5))
        with pytest.raises(CheckpointCorruptError, match="can't be read"):
            reader.read(dataclasses.replace(entry, name="nothing"), (0, 0), (7, 5))
