"""Pretrained weights from safetensors files, into modules that are on one device, replicated and sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_shard import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    load_pretrained,
)
from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.nets import Net, build
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import whole

KINDS = [("plain", 1), ("ddp", 2), ("fsdp-2", 2), ("fsdp-3", 3), ("fsdp-2x1", 2), ("fsdp-offload-2", 2)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """``model.safetensors`` of a `Net`, without the second name of its tied weight."""
    state = {name: tensor.clone() for name, tensor in Net(5).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def loaded(path: str, kind: str) -> tuple[dict[str, Tensor], bool, list[float], LoadReport]:
    net, _ = build(kind, 1)
    report = load_pretrained(net, path)
    module = net.module if kind == "ddp" else net
    found = {name: whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return found, module.head.weight is module.embed.weight, found.pop("scratch").tolist(), report


@pytest.mark.parametrize(("kind", "ranks"), sampled(KINDS, 0, 2))
def test_every_engine_gets_the_values_in_the_files(weights: Path, kind: str, ranks: int) -> None:
    expected = Net(5)
    for found, tied, scratch, report in run_distributed(loaded, ranks, str(weights), kind):
        named = dict(expected.named_parameters()) | dict(expected.named_buffers())
        named.pop("scratch")
        assert_equal(found, {name: tensor.detach() for name, tensor in named.items()})
        assert tied
        assert scratch == [1.0, 1.0], "a buffer that is not persistent is the model's own"
        assert report == LoadReport()


def test_an_export_of_many_files_is_loaded_and_cast(tmp_path: Path, trained: Path) -> None:
    export(open_any(trained), tmp_path / "out", max_shard_bytes=100)
    for path in tmp_path / "out", tmp_path / "out" / "model.safetensors.index.json":
        net = Net(1).to(torch.float64)
        load_pretrained(net, path)
        assert torch.equal(net.embed.weight, stored(trained)["model.embed.weight"].double())


@pytest.mark.parametrize(
    ("rename", "name"),
    [
        ({"a.": "b."}, "b.c.d"),
        ({"": "x"}, "x.a.c.d"),
        ({"": "x", "a.c": "y"}, "y.d"),
        ({"a.c.d": "e"}, "e"),
        ({"a": None, "a.c": "kept"}, "kept.d"),
        ({"a.cc": "b", "c": "b"}, "a.c.d"),
    ],
)
def test_renaming(tmp_path: Path, rename: dict[str, str | None], name: str) -> None:
    save_file({"a.c.d": torch.ones(2), "z": torch.zeros(1)}, tmp_path / "w.safetensors")
    owner = module = nn.Module()
    *path, last = name.split(".")
    for part in path:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(last, nn.Parameter(torch.zeros(2)))
    load_pretrained(module, tmp_path / "w.safetensors", rename={**rename, "z": None})
    assert next(module.parameters()).tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointMismatchError, match=r"gives a\.c\.d and z one name, x"):
        load_pretrained(module, tmp_path / "w.safetensors", rename={"a.c.d": "x", "z": "x"})


def test_names_that_do_not_fit_are_listed_together_and_nothing_changes(weights: Path) -> None:
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
    load_pretrained(net, tmp_path / "other.safetensors", rename={"embed.weight": None})
    assert torch.equal(net.embed.weight, state["head.weight"] + 1), "under its other name"


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
        '{"weight_map": {"a": "none.safetensors"}}': "none.safetensors is no regular file",
    }.items():
        index.write_text(text)
        with pytest.raises(CheckpointCorruptError, match=said):
            load_pretrained(Net(1), index)
