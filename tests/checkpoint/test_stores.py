"""Checkpoints in an object store, over fsspec's store in memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_shard import tools
from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import commit, stores, tensor_files
from lightning_shard.checkpoint.files.layout import new_token
from lightning_shard.checkpoint.files.location import location
from lightning_shard.checkpoint.files.manifest import Facts, is_checkpoint
from lightning_shard.checkpoint.files.tensor_files import write_file
from lightning_shard.checkpoint.foreign.pretrained_weights import load_pretrained
from lightning_shard.checkpoint.inspect import verify
from lightning_shard.checkpoint.load import find_checkpoints, open_checkpoint, open_newest
from lightning_shard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUnreachableError,
)
from tests.checkpoint.calls import save_tensors
from tests.checkpoint.test_commit import number_in, save_number
from tests.harness import run_distributed

URL = "memory://run/last.ckpt"


class Down(MemoryFileSystem):
    """The same store, which lists folders and then refuses to open a checkpoint."""

    protocol = "down"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("down://", "memory://"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path.endswith(".ckpt"):
            raise PermissionError("no credentials")
        return super().ls(path, detail, **kwargs)


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def objects(store: MemoryFileSystem, folder: str = "/run") -> list[str]:
    return sorted(name.removeprefix(f"{folder}/") for name in store.find(folder))


def half_written(path: str) -> str:
    """What a killed save leaves at ``path``; its token."""
    token = new_token()
    write_file(commit.create_temporary(location(path), token) / "__0_0.distcp", b"some")
    return token


def run_of(step: int) -> Facts:
    return Facts(engine="ddp", policy="fp32", run={"name": "a", "step": step, "time": 0.0})


def test_a_replacement_takes_effect_at_once_and_leaves_the_one_before_to_its_readers(store: Any) -> None:
    save_number(URL, 1.0)
    assert len(verify(URL)) == 5
    reader = open_checkpoint(URL)
    save_number(URL, 2.0)
    assert number_in(URL) == 2.0
    assert tensor_files.read_full(reader.directory, reader.metadata, "model.w0").tolist() == [1.0] * 100
    save_number(URL, 3.0)
    assert number_in(URL) == 3.0
    with pytest.raises(CheckpointError, match="was replaced or removed while it was read: read it again") as said:
        tensor_files.read_full(reader.directory, reader.metadata, "model.w0")
    assert not isinstance(said.value, CheckpointCorruptError)
    # The files of two saves, and what says which is the checkpoint.
    assert len(objects(store)) == 2 * 5 + 1


def test_a_reader_never_mixes_two_saves(store: Any) -> None:
    """One thread saves without end, another reads: one of the saves, whole, or is told to read again."""
    save_number(URL, 0.0)
    ended, failures = threading.Event(), list[BaseException]()

    def save_without_end() -> None:
        try:
            for number in itertools.count(1):
                if ended.is_set():
                    return
                save_number(URL, float(number))
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=save_without_end)
    writer.start()
    seen: set[float] = set()
    try:
        while len(seen) < 10 and not failures:
            try:
                seen.add(number_in(URL))  # type: ignore[arg-type]
            except CheckpointError as error:
                if not str(error).endswith("read it again"):
                    raise
    finally:
        ended.set()
        writer.join()
    assert not failures
    assert verify(URL)


def test_a_folder_copied_to_a_disk_is_a_checkpoint_and_so_is_one_copied_from_there(store: Any, tmp_path: Path) -> None:
    save_number(URL, 1.0)
    (folder,) = (name for name in store.ls("/run/last.ckpt", detail=False) if not name.endswith(".json"))
    disk = tmp_path / "disk.ckpt"
    disk.mkdir()
    for name in store.find(folder):
        (disk / name.rpartition("/")[2]).write_bytes(store.cat(name))
    assert number_in(disk) == 1.0
    for path in disk.iterdir():
        store.pipe(f"/run/back.ckpt/{path.name}", path.read_bytes())
    back = "memory://run/back.ckpt"
    assert number_in(back) == 1.0
    reader = open_checkpoint(back)
    save_number(back, 2.0)
    assert tensor_files.read_full(reader.directory, reader.metadata, "model.w1").tolist() == [1.0] * 100
    save_number(back, 3.0)
    assert number_in(back) == 3.0
    assert not [name for name in objects(store, "/run/back.ckpt") if "/" not in name and name != "manifest.json"]


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleaned(store: Any, monkeypatch: Any) -> None:
    save_number(URL, 1.0)
    store.pipe("/run/last.ckpt/notes.txt", b"a user's own")
    tokens = [half_written(URL), half_written("memory://run/step=5.ckpt")]
    with pytest.raises(CheckpointNotFoundError, match="half-written"):
        open_checkpoint("memory://run/step=5.ckpt")
    assert [path for path, _ in find_checkpoints(["memory://run"], "a").own] == []
    save_number(URL, 2.0)  # Others may be saving there.
    found = commit.clean_folder("memory://run", remove=False)
    assert sorted(path.name for path in found) == sorted(tokens)
    assert len([name for name in objects(store) if any(token in name for token in tokens)]) == 4
    monkeypatch.setattr(stores, "_IDLE_SECONDS", 0.0)
    save_number(URL, 3.0)
    assert not [name for name in objects(store) if any(token in name for token in tokens)]
    assert number_in(URL) == 3.0
    assert store.cat("/run/last.ckpt/notes.txt") == b"a user's own"


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


def test_removing_begins_with_what_makes_it_a_checkpoint(store: Any, monkeypatch: Any) -> None:
    save_number(URL, 1.0)
    store.pipe("/run/last.ckpt/notes.txt", b"a user's own")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stores, "_delete_unreferenced", killed)
        with pytest.raises(KeyboardInterrupt):
            commit.remove_checkpoint(URL)
    assert not is_checkpoint(URL)
    (left,) = commit.clean_folder("memory://run", remove=True)
    assert str(left).startswith("memory://")
    assert objects(store) == ["last.ckpt/notes.txt"]


def test_a_save_that_begins_while_another_ends_keeps_its_files(store: Any, monkeypatch: Any) -> None:
    listed, begun = stores._markers, list[str]()

    def and_another_begins(folder: Any) -> Any:
        found = listed(folder)
        begun.extend([] if begun else [half_written(URL)])
        return found

    save_number(URL, 1.0)
    monkeypatch.setattr(stores, "_markers", and_another_begins)
    save_number(URL, 2.0)
    assert f"last.ckpt/{begun[0]}/__0_0.distcp" in objects(store)
    commit.remove_checkpoint(URL)
    assert f"last.ckpt/{begun[0]}/__0_0.distcp" in objects(store)
    assert [path.name for path in commit.clean_folder("memory://run", remove=True)] == begun
    assert objects(store) == []


def save_apart() -> str:
    """Each process has a memory of its own."""
    with pytest.raises(CheckpointError) as refused:
        save_tensors(URL, {f"model.{n}": torch.ones(9) for n in range(4)}, {})
    return str(refused.value)


def test_a_store_that_ranks_do_not_share_is_told(store: Any) -> None:
    first, second = run_distributed(save_apart, 2)
    assert first == second
    assert "__1_0.distcp in " in first


@pytest.mark.parametrize("name", ["a[1]", "a?", "*"])
def test_a_name_is_no_pattern(store: Any, name: str) -> None:
    save_number("memory://run/a1/last.ckpt", 1.0)
    before = objects(store)
    url = f"memory://run/{name}/last.ckpt"
    for number in 1.0, 2.0, 3.0:
        save_number(url, number)
    assert number_in(url) == 3.0
    assert len(objects(store, f"/run/{name}")) == 2 * 5 + 1
    commit.remove_checkpoint(url)
    assert objects(store) == before


def test_flipped_bytes_are_found(store: Any) -> None:
    save_number(URL, 1.0, size=2)
    for name in store.find("/run"):
        if name.endswith((".metadata",)):
            continue  # tested as every file below
        whole = store.cat(name)
        for at in range(0, len(whole), max(len(whole) // 40, 1)):
            store.pipe(name, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointCorruptError):
                verify(URL)
        store.pipe(name, whole[:-1])
        with pytest.raises(CheckpointCorruptError):
            verify(URL)
        store.pipe(name, whole)
        assert verify(URL)
    store.rm(next(name for name in store.find("/run") if name.endswith(".distcp")))
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        verify(URL)


def test_the_newest_of_a_run_is_found_there_and_a_broken_one_passed_over(store: Any) -> None:
    for step in 1, 2, 3:
        save_tensors(f"memory://run/{step}.ckpt", {"model.w": torch.full((3,), step)}, {}, facts=run_of(step))
    data = next(name for name in store.find("/run/3.ckpt") if name.endswith(".distcp"))
    store.pipe(data, store.cat(data)[::-1])
    found = open_newest(["memory://run", "memory://nothing"], "a")
    assert found.newest is not None
    assert str(found.newest.path).endswith("/run/2.ckpt")
    assert [run["step"] for _, run in found.own] == [3, 2, 1]
    assert "3.ckpt is damaged" in found.broken[0]


def test_a_store_that_does_not_answer_is_not_an_empty_one() -> None:
    fsspec.register_implementation("down", Down, clobber=True)
    save_number(URL, 1.0)
    with pytest.raises(CheckpointUnreachableError, match=r"down://.*can't be reached: PermissionError: no credentials"):
        find_checkpoints(["down://run"], "a")
    with pytest.raises(CheckpointUnreachableError, match="no credentials"):
        open_checkpoint("down://run/last.ckpt")


def test_converting_to_a_store_and_back(store: Any, tmp_path: Path) -> None:
    save_number(URL, 1.0)
    assert tools.convert(URL, tmp_path / "one.ckpt").form == "full"
    done = tools.convert(tmp_path / "one.ckpt", "memory://other/back.ckpt")
    assert number_in("memory://other/back.ckpt") == 1.0
    assert str(done.path).startswith("memory://")
    tools.convert(done.path, tmp_path / "disk.ckpt", form="portable")
    assert number_in(tmp_path / "disk.ckpt") == 1.0
    assert [file.name for file in tools.export(URL, tmp_path / "weights")] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="exists"):
        tools.convert(URL, "memory://other/back.ckpt", form="portable")


def test_what_there_is_not_in_a_store_is_refused(store: Any, tmp_path: Path) -> None:
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
