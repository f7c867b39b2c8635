"""``torch.save``'s format, written and read tensor by tensor."""

from __future__ import annotations

import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.checkpoint.files.archive import materialize, read_archive, write_archive
from lightning_shard.checkpoint.files.manifest import StoredTensor
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
)
from tests.checkpoint.compare import assert_equal
from tests.checkpoint.hostile import Hostile
from tests.checkpoint.nets import odd_tensors

# torch.save's format, tensor by tensor


def stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.contiguous)


def test_torch_reads_what_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    values = odd_tensors(0, cut=False) | {
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "u16": torch.tensor([1, 2**16 - 1], dtype=torch.uint16),
    }
    tree = {key: stored(tensor) for key, tensor in values.items()}
    rest = {"list": [1, (2.5, "a", None, True)], "ordered": OrderedDict(b=1), "plain": torch.randn(3, 2).t()}
    path = tmp_path / "a.ckpt"
    write_archive(path, {**tree, **rest, "tied": tree["model.rows"]})
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert_equal({key: found[key] for key in values}, {k: v.contiguous() for k, v in values.items()})
        assert found["tied"].data_ptr() == found["model.rows"].data_ptr()
        assert torch.equal(found["plain"], rest["plain"])
        assert (found["list"], found["ordered"]) == (rest["list"], rest["ordered"])
        assert all(found[key].data_ptr() % 64 == 0 for key in values if values[key].numel()), "aligned for mmap"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_what_torch_wrote_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    values = odd_tensors(0, cut=False)
    base = torch.randn(6, 4)
    values |= {"base": base, "view": base[2:4, 1:3], "turned": base.t(), "parameter": torch.nn.Parameter(base)}
    torch.save({**values, "nested": [{"x": (1, torch.ones(2))}]}, tmp_path / "a.pt")
    tree = read_archive(tmp_path / "a.pt")
    assert all(isinstance(tree[key], StoredTensor) for key in values)
    found = materialize(tree)
    assert_equal({k: found[k] for k in values}, {k: v.detach().contiguous() for k, v in values.items()})
    assert found["nested"][0]["x"][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("value", "named"), [(Hostile(), "tests.checkpoint.hostile.ran"), (Path("/x"), "pathlib")])
def test_a_file_that_names_anything_else_is_refused_by_that_name(tmp_path: Path, value: Any, named: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": {"x": value}}, path)
    with pytest.raises(CheckpointCorruptError, match=rf"a\.ckpt names {re.escape(named)}.*nothing in it ran"):
        open_any(path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02N.", b"no checkpoint"])
def test_a_file_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is no whole file of torch\.save"):
        open_any(tmp_path / "a.ckpt")
    torch.save([1], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="there is no state_dict in it"):
        open_any(tmp_path / "b.ckpt")


def test_a_compressed_file_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(1000)}}, tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "a.ckpt") as plain:
        with zipfile.ZipFile(tmp_path / "b.ckpt", "w", zipfile.ZIP_DEFLATED) as packed:
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match=r"b\.ckpt is compressed \(a/data\.pkl\).*without compression"):
        open_any(tmp_path / "b.ckpt")


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_archive(path, {"state_dict": {"w": torch.zeros(4)}})
    opened = read_archive(path)
    path.unlink()
    write_archive(path, {"state_dict": {"w": torch.ones(4)}})
    assert opened["state_dict"]["w"].read().tolist() == [0.0] * 4


@pytest.mark.parametrize("how", ["without padding", "in another order"])
def test_a_file_that_was_zipped_by_another_program_is_read(tmp_path: Path, how: str) -> None:
    torch.save({f"w{n}": torch.full((8, 8), float(n)) for n in range(12)}, tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "a.ckpt") as old, zipfile.ZipFile(tmp_path / "b.ckpt", "w") as new:
        infos = old.infolist()
        if how == "in another order":  # of the same sizes, and with the same padding
            at = [n for n, info in enumerate(infos) if info.filename in ("a/data/3", "a/data/4")]
            infos[at[0]], infos[at[1]] = infos[at[1]], infos[at[0]]
        for info in infos:
            new.writestr(info.filename if how == "without padding" else info, old.read(info))
    found = read_archive(tmp_path / "b.ckpt")
    assert all(found[f"w{n}"].read().eq(n).all() for n in range(12))


def test_records_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", b"x" * 1000)
        archive.filelist += [archive.filelist[1]] * 5
    with pytest.raises(CheckpointCorruptError, match="lie in each other"):
        read_archive(tmp_path / "a.ckpt")
