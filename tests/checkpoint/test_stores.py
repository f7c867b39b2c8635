"""Checkpoints in an object store, over fsspec's store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_shard import tools
from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import commit, tensor_files
from lightning_shard.checkpoint.files.layout import new_token
from lightning_shard.checkpoint.files.location import location
from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.files.tensor_files import write_file
from lightning_shard.checkpoint.foreign.pretrained_weights import load_pretrained
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import find_checkpoints, open_checkpoint, open_newest
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CheckpointUnreachableError,
)
from tests.checkpoint.calls import save_tensors
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import run_distributed

URL = "memory://run/last.ckpt"


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def objects(store: MemoryFileSystem, folder: str = "/run") -> list[str]:
    return sorted(name.removeprefix(f"{folder}/") for name in store.find(folder))


def half_written(path: str) -> str:
    """Leave a killed save's folder at ``path``. Returned: its name."""
    folder = commit.create_temporary(location(path), new_token())
    write_file(folder / "__0_0.distcp", b"some")
    return folder.name


def test_a_replacement_takes_effect_at_once_and_leaves_the_one_before_to_its_readers(store: Any) -> None:
    save_number(URL, 1.0)
    assert len(verify(URL)) == 5
    reader = open_checkpoint(URL)
    save_number(URL, 2.0)
    assert number_in(URL) == 2.0
    assert tensor_files.read_full(reader.directory, reader.metadata, "model.w0").tolist() == [1.0] * 100
    save_number(URL, 3.0)
    assert number_in(URL) == 3.0
    with pytest.raises(CheckpointReplacedError, match="was replaced or removed while it was read: read it again"):
        tensor_files.read_full(reader.directory, reader.metadata, "model.w0")
    assert len(objects(store)) == 2 * 5


def test_a_folder_copied_to_a_disk_is_a_checkpoint_and_so_is_one_copied_from_there(store: Any, tmp_path: Path) -> None:
    save_number(URL, 1.0)
    (folder,) = store.ls("/run/last.ckpt", detail=False)
    disk, back = tmp_path / "disk.ckpt", "memory://run/back.ckpt"
    disk.mkdir()
    for name in store.find(folder):
        (disk / name.rpartition("/")[2]).write_bytes(store.cat(name))
    assert number_in(disk) == 1.0
    for path in disk.iterdir():
        store.pipe(f"/run/back.ckpt/{path.name}", path.read_bytes())
    store.pipe("/run/back.ckpt/notes.txt", b"a user's own")
    assert number_in(back) == 1.0
    for number in 2.0, 3.0:
        save_number(back, number)
        assert number_in(back) == number
    assert [name for name in objects(store, "/run/back.ckpt") if "/" not in name] == ["notes.txt"]


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleaned(store: Any) -> None:
    save_number(URL, 1.0)
    names = [half_written(URL), half_written("memory://run/step=5.ckpt")]
    with pytest.raises(CheckpointNotFoundError, match="half-written"):
        open_checkpoint("memory://run/step=5.ckpt")
    assert [path for path, _ in find_checkpoints(["memory://run"], "a").own] == []
    save_number(URL, 2.0)  # the other one may be running
    assert number_in(URL) == 2.0
    found = commit.clean_folder("memory://run", remove=False)
    assert sorted(path.name for path in found) == sorted(names)
    save_number(URL, 3.0)
    assert [path.name for path in commit.clean_folder("memory://run", remove=True)] == names[1:]
    assert len(objects(store)) == 2 * 5


def test_a_save_that_fails_leaves_nothing_and_the_old_one(store: Any, monkeypatch: Any) -> None:
    save_number(URL, 1.0)
    before = objects(store)

    def fail(*_: Any) -> None:
        raise OSError("the line is cut")

    monkeypatch.setattr(tensor_files.HashedFile, "write", fail)
    with pytest.raises(CheckpointError, match="the line is cut"):
        save_number(URL, 2.0)
    assert objects(store) == before
    assert number_in(URL) == 1.0


def save_apart() -> str:
    """Each process has a memory of its own."""
    with pytest.raises(CheckpointError) as refused:
        save_tensors(URL, {f"model.{n}": torch.ones(9) for n in range(4)}, {})
    return str(refused.value)


def test_a_store_that_ranks_do_not_share_is_told(store: Any) -> None:
    first, second = run_distributed(save_apart, 2)
    assert first == second
    assert "__1_0.distcp in " in first


def test_the_newest_of_a_run_is_found_there_and_a_broken_one_passed_over(store: Any) -> None:
    for step in 1, 2, 3:
        facts = Facts(engine="ddp", policy="fp32", run={"name": "a", "step": step, "time": 0.0})
        save_tensors(f"memory://run/{step}.ckpt", {"model.w": torch.full((3,), step)}, {}, facts=facts)
    data = next(name for name in store.find("/run/3.ckpt") if name.endswith(".distcp"))
    store.pipe(data, store.cat(data)[::-1])
    found = open_newest(["memory://run", "memory://nothing"], "a")
    assert found.newest is not None
    assert str(found.newest.path).endswith("/run/2.ckpt")
    assert [run["step"] for _, run in found.own] == [3, 2, 1]
    assert "3.ckpt is damaged" in found.broken[0]
    store.rm(data)
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        verify("memory://run/3.ckpt")


def test_a_store_that_does_not_answer_is_not_an_empty_one(store: Any, monkeypatch: Any) -> None:
    save_number(URL, 1.0)
    listed = MemoryFileSystem.ls

    def ls(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith(".ckpt"):
            raise PermissionError("no credentials")
        return listed(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(CheckpointUnreachableError, match=r"can't be reached: PermissionError: no credentials"):
        find_checkpoints(["memory://run"], "a")


def test_forms_that_a_store_has_not_are_refused(store: Any, tmp_path: Path) -> None:
    save_number(URL, 1.0)
    store.pipe("/run/stock.ckpt", b"PK")
    for refused, said in {
        (lambda: save_number("memory://run/a.full.ckpt", 1.0, saver=Saver())): "not one file or a folder",
        (lambda: tools.convert(URL, "memory://run/one.ckpt")): "not one file",
        (lambda: tools.export(URL, "memory://run/out")): "not safetensors files",
        (lambda: load_pretrained(torch.nn.Linear(1, 1), "s3://a/weights")): "not safetensors files",
        (lambda: open_checkpoint("memory://run/stock.ckpt")): "stock.ckpt is a file",
        (lambda: save_number("memory://run/stock.ckpt", 1.0)): "stock.ckpt is a file",
        (lambda: open_checkpoint("memory://run/none.ckpt")): "there is no checkpoint at",
        (lambda: location("drive://a/b.ckpt")): "names no store that fsspec reaches",
        (lambda: location("gs://a/b.ckpt", {"token": "anon"})): "pip install gcsfs",
        (lambda: location("memory://run//b.ckpt")): "two slashes in a row",
        (lambda: location("a.ckpt", {"anon": True})): "storage_options is {'anon': True}",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            refused()
    assert location(f"file://{tmp_path}/a.ckpt") == tmp_path / "a.ckpt"
