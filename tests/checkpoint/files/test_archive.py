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

from lightning_shard.checkpoint.files.archive import read_archive, write_archive
from lightning_shard.checkpoint.files.manifest import StoredTensor
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint.compare import assert_equal
from tests.checkpoint.hostile import Hostile
from tests.checkpoint.nets import odd_tensors


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
    base = torch.randn(6, 4)
    views = {"view": base[2:4, 1:3], "turned": base.t(), "parameter": torch.nn.Parameter(base)}
    values = {**odd_tensors(0, cut=False), "base": base, **views}
    torch.save({**values, "nested": [{"x": (1, torch.ones(2))}]}, tmp_path / "a.pt")
    tree = read_archive(tmp_path / "a.pt")
    found = {key: StoredTensor.of(tree[key]).read() for key in values}
    assert_equal(found, {key: value.detach().contiguous() for key, value in values.items()})
    assert tree["nested"][0]["x"][1].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match=r"sparse.* tensor; only dense tensors can be read"):
        StoredTensor.of(torch.eye(2).to_sparse())


@pytest.mark.parametrize(("value", "named"), [(Hostile(), "tests.checkpoint.hostile.ran"), (Path("/x"), "pathlib")])
def test_a_file_that_names_anything_else_is_refused_by_that_name(tmp_path: Path, value: Any, named: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": {"x": value}}, path)
    with pytest.raises(CheckpointCorruptError, match=rf"a\.ckpt names {re.escape(named)}.*nothing in it ran"):
        open_any(path)


def test_files_of_another_kind(tmp_path: Path) -> None:
    for data in b"", b"PK\x03\x04", b"\x80\x02N.":
        (tmp_path / "a.ckpt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"a\.ckpt is no whole file of torch\.save"):
            open_any(tmp_path / "a.ckpt")
    torch.save([1], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="there is no state_dict in it"):
        open_any(tmp_path / "b.ckpt")


def test_records_that_would_take_more_memory_than_the_file_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a/data.pkl", b"")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is compressed \(a/data\.pkl\).*without compression"):
        read_archive(tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "b.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", b"x" * 1000)
        archive.filelist += [archive.filelist[1]] * 5
    with pytest.raises(CheckpointCorruptError, match="lie in each other"):
        read_archive(tmp_path / "b.ckpt")
