"""A save is whole or did not happen, whatever fails, and all ranks say the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import commit, tensor_files
from lightning_shard.checkpoint.files.layout import MANIFEST, try_lock
from lightning_shard.checkpoint.files.manifest import Contents, is_checkpoint, read_manifest
from lightning_shard.checkpoint.files.tensor_files import read_full
from lightning_shard.checkpoint.load import open_checkpoint
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from tests.checkpoint.calls import FACTS, load_into
from tests.harness import run_distributed


def save_number(
    path: str | Path, number: float, size: int = 100, state: Any = None, saver: Saver | None = None, **kwargs: Any
) -> None:
    """Every rank has a part of its own, so that every rank writes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors = {f"model.w{r}": torch.full((size,), number) for r in range(4)}
    tensors[f"model.{rank}"] = torch.ones(())
    whole = Contents(tensors=tensors, trainer_state=state or {"n": number}, facts=FACTS)
    (saver or Saver()).save(str(path), lambda: whole, **{"background": False, **kwargs})


def number_in(path: Path) -> float:
    """The number that the checkpoint was saved with; fails if it is not whole or is a mixture."""
    opened = open_checkpoint(path)
    keys = [key for key in opened.manifest.tensors if key.startswith("model.w")]
    tensors = [read_full(opened.directory, opened.metadata, key) for key in keys]
    (number,) = {value for tensor in tensors for value in tensor.tolist()}
    assert opened.trainer_state["n"] == number
    return number


def test_replacing_leaves_the_new_one_alone(tmp_path):
    path = tmp_path / "deep" / "a.ckpt"
    save_number(path, 1.0)
    other = path.parent / ".b.ckpt.tmp-1234"
    other.mkdir()
    # as interrupted saves and removals leave them
    shutil.copytree(path, path.parent / ".a.ckpt.tmp-0123")
    (path.parent / ".a.ckpt.tmp-0123" / MANIFEST).unlink()
    (path.parent / ".a.ckpt.old-0123").mkdir()
    save_number(path, 2.0)
    assert number_in(path) == 2.0
    assert sorted(os.listdir(path.parent)) == [other.name, "a.ckpt"]
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "boxes.bin", MANIFEST, "trainer.pt"]
    (path.parent / ".a.ckpt.tmp-0123").mkdir()
    for _ in range(2):
        commit.remove_checkpoint(path)
        assert os.listdir(path.parent) == [other.name]


def test_half_written_is_no_checkpoint_and_is_replaced(tmp_path):
    path = tmp_path / "a.ckpt"
    save_number(path, 1.0)
    (path / MANIFEST).unlink()
    assert not is_checkpoint(path)
    with pytest.raises(CheckpointNotFoundError, match=r"a\.ckpt is .*half-written.*manifest\.json"):
        load_into(path, {"model.0": torch.zeros(())})
    save_number(path, 2.0)
    assert number_in(path) == 2.0
    (path / MANIFEST).unlink()
    commit.remove_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_what_no_save_wrote_is_never_deleted(tmp_path):
    """A directory of other files, and a checkpoint that torch wrote for another program."""
    notes, torchs = tmp_path / "work", tmp_path / "a.ckpt"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=torchs, no_dist=True)
    for path in (notes, torchs):
        there = sorted(os.listdir(path))
        for delete in (lambda path=path: save_number(path, 1.0), lambda path=path: commit.remove_checkpoint(path)):
            with pytest.raises(CheckpointError, match="would delete them"):
                delete()
            assert sorted(os.listdir(path)) == there
        with pytest.raises(CheckpointNotFoundError, match=r"is not a checkpoint.*: it has no manifest"):
            read_manifest(path)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "work"]


def test_a_file_or_a_link_at_the_path_is_replaced(tmp_path):
    (tmp_path / "a.ckpt").write_text("an older form")
    save_number(tmp_path / "a.ckpt", 1.0)
    os.symlink(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    save_number(tmp_path / "last.ckpt", 2.0)
    assert number_in(tmp_path / "a.ckpt") == 1.0
    assert number_in(tmp_path / "last.ckpt") == 2.0
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "last.ckpt"]


@pytest.mark.parametrize("new_is_whole", [True, False])
def test_a_replacement_that_was_interrupted_is_read_and_then_replaced(tmp_path, new_is_whole):
    path = tmp_path / "a.ckpt"
    save_number(path, 1.0)
    path.rename(tmp_path / ".a.ckpt.old-0123")
    save_number(tmp_path / "b.ckpt", 2.0)
    (tmp_path / "b.ckpt").rename(tmp_path / ".a.ckpt.tmp-0123")
    if not new_is_whole:
        (tmp_path / ".a.ckpt.tmp-0123" / MANIFEST).unlink()
    there = sorted(os.listdir(tmp_path))
    assert number_in(path) == (2.0 if new_is_whole else 1.0)
    assert sorted(os.listdir(tmp_path)) == there, "who reads changes nothing"
    save_number(path, 3.0)
    assert number_in(path) == 3.0
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("exchange", [True, False])
def test_the_path_names_a_whole_checkpoint_after_every_change_of_names(tmp_path, monkeypatch, exchange):
    path = tmp_path / "a.ckpt"
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if exchange and not commit._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("the filesystem of the temporary directory has no RENAME_EXCHANGE")
    seen: list[bool] = []

    def watched(change: Any) -> Any:
        def call(*args: Any) -> Any:
            result = change(*args)
            seen.append(is_checkpoint(path))
            return result

        return call

    save_number(path, 1.0)
    monkeypatch.setattr(commit, "_exchange", watched(commit._exchange) if exchange else lambda *_: False)
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(commit, "delete_tree", watched(commit.delete_tree))
    save_number(path, 2.0)
    assert len(seen) >= 2
    assert all(seen)
    assert number_in(path) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "one", "other"]


def no_space(self: object, data: bytes) -> int:
    raise OSError(28, "No space left on device")


def interrupt(self: object, data: bytes) -> int:
    raise KeyboardInterrupt("stop")


def failing_saves(folder: str) -> list[str]:
    """What this rank says of saves that fail on one rank."""
    said, limits, path = [], resource.getrlimit(resource.RLIMIT_FSIZE), f"{folder}/a.ckpt"
    save_number(path if dist.get_rank() == 0 else f"{folder}/b.ckpt", 1.0)  # the path of rank 0 counts
    for failing_rank, write in ((1, no_space), (0, no_space), (1, interrupt), (1, None), (0, None)):
        state: dict[str, Any] = {"n": 2.0}
        if write is None and failing_rank == 1 == dist.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        if write is None and failing_rank == 0:
            state["callbacks"] = {"MyCallback": {"folder": Path("/x"), "fine": 1}}
        with pytest.MonkeyPatch.context() as patch:
            if write is not None and failing_rank == dist.get_rank():
                patch.setattr(tensor_files.HashedFile, "write", write)
            with pytest.raises(BaseException) as failure:  # noqa: PT011
                save_number(path, 2.0, size=5000, state=state)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said.append(f"{failure.type.__name__}: {failure.value}")
    with pytest.raises(CheckpointError) as failure:
        save_number(f"{folder}/a.ckpt/trainer.pt/b.ckpt", 1.0)
    return [*said, str(failure.value)]


def test_a_failing_rank_fails_all_and_the_old_one_stays(tmp_path):
    first, second = run_distributed(failing_saves, 2, str(tmp_path))
    assert [said for said in first if "Keyboard" not in said] == [said for said in second if "Keyboard" not in said]
    for rank, said in ((1, first[0]), (0, first[1])):
        wanted = rf"CheckpointError: while writing .*a\.ckpt: rank {rank}: OSError: \[Errno 28\] No space left"
        assert re.match(wanted, said), said
    assert second[2] == "KeyboardInterrupt: stop"
    assert "rank 1: KeyboardInterrupt: stop" in first[2]
    assert "rank 1: OSError: [Errno 27] File too large" in first[3]
    wanted = r"CheckpointError: the trainer's state .*: callbacks/MyCallback/folder: pathlib\.PosixPath\. "
    assert re.match(wanted, first[4]), first[4]
    assert "rank 0: FileExistsError" in first[5]
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert number_in(tmp_path / "a.ckpt") == 1.0


def test_what_interrupted_removals_and_files_left_is_removed_by_the_next_save_or_by_hand(tmp_path):
    save_number(tmp_path / "top.ckpt", 1.0)
    left = [
        ".top.ckpt.tmp-0123456789ab",
        "..a.full.ckpt.tmp-0123456789ab.tmp-ab0123456789",
        ".b.full.ckpt.tmp-0123456789ab",
    ]
    for clean in (lambda: commit.clean_folder(tmp_path, remove=True), lambda: save_number(tmp_path / "new.ckpt", 2.0)):
        for name in left[:2]:
            shutil.copytree(tmp_path / "top.ckpt", tmp_path / name)
        (tmp_path / left[2]).write_text("half")
        save_number(tmp_path / "new.ckpt", 1.0)
        assert {*left} <= {*os.listdir(tmp_path)}, "they may be a save's that goes on"
        for name in left:
            os.utime(tmp_path / name, (0, 0))
        (tmp_path / "..hidden.tmp-of-a-user").touch()
        assert commit.clean_folder(tmp_path, remove=False) == sorted(tmp_path / name for name in left)
        with read_by_another(tmp_path / left[0]):
            assert commit.clean_folder(tmp_path, remove=False) == sorted(tmp_path / name for name in left[1:])
        clean()
        assert {*os.listdir(tmp_path)} - {"new.ckpt"} == {"top.ckpt", "..hidden.tmp-of-a-user"}


@contextlib.contextmanager
def read_by_another(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    assert try_lock(descriptor, fcntl.LOCK_SH)
    yield
    os.close(descriptor)
