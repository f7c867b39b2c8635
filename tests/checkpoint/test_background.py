"""Saves in the background: what they write, and what they wait for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.checkpoint import background
from lightning_shard.checkpoint.background import HostBuffers, Saver, pinned_like
from lightning_shard.checkpoint.files import tensor_files
from lightning_shard.checkpoint.files.manifest import Contents, Facts, is_checkpoint
from lightning_shard.checkpoint.load import find_checkpoints, open_checkpoint
from tests.checkpoint.calls import FACTS
from tests.checkpoint.compare import stored


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._write = tensor_files.HashedFile.write

    def __enter__(self) -> Gate:
        def write(file: tensor_files.HashedFile, data: Any) -> int:
            self.reached.set()
            assert self.opened.wait(60)
            return self._write(file, data)

        tensor_files.HashedFile.write = write  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        tensor_files.HashedFile.write = self._write  # type: ignore[method-assign]


def of(tensors: dict[str, Tensor], **state: Any) -> Callable[[], Contents]:
    return lambda: Contents(tensors=tensors, trainer_state=state, facts=FACTS)


@pytest.fixture
def saver() -> Saver:
    return Saver()


def test_what_is_written_are_the_values_at_the_call(tmp_path: Path, saver: Saver) -> None:
    path, tensor, state = tmp_path / "a.ckpt", torch.arange(6.0), {"list": [1]}
    with Gate() as gate:
        saver.save(str(path), of({"model.w": tensor}, **state), background=True)
        assert gate.reached.wait(60)
        tensor.zero_()
        state["list"].append(2)
        assert not path.exists()
        assert saver.is_writing(path)
    saver.finish_background_save()
    assert not saver.is_writing(path)
    assert torch.equal(stored(path)["model.w"], torch.arange(6.0))
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert torch.load(path / "trainer.pt", weights_only=True)["list"] == [1]


def test_readers_wait(tmp_path: Path, saver: Saver) -> None:
    readers = (open_checkpoint, lambda path: find_checkpoints([path.parent], "mine").own[0])
    for number, read in enumerate(readers):
        path = tmp_path / str(number) / "a.ckpt"
        facts = Facts(engine="test", policy="fp32", run={"name": "mine", "step": 1, "time": 0.0})
        state = Contents(tensors={"model.w": torch.zeros(3)}, trainer_state={}, facts=facts)
        with Gate() as gate:
            saver.save(str(path), lambda state=state: state, background=True)
            threading.Timer(0.05, gate.opened.set).start()
            read(path)
    saver.finish_background_save()


def test_nothing_old_is_removed_before_the_new_is_whole(tmp_path: Path, saver: Saver) -> None:
    old, new, last = tmp_path / "old.ckpt", tmp_path / "new.ckpt", tmp_path / "last.ckpt"
    for path in (old, last):
        saver.save(str(path), of({"model.w": torch.zeros(3)}), background=False)
    with Gate():
        saver.save(str(new), of({"model.w": torch.ones(3)}), background=True)
        saver.remove_checkpoint(old)
        saver.link_checkpoint(new, last)
        saver.link_checkpoint(new, tmp_path / "first.ckpt")
        assert [saver.is_writing(tmp_path / name) for name in ("new.ckpt", "first.ckpt")] == [True, True]
        assert not saver.is_writing(old)
        assert is_checkpoint(old)
        assert is_checkpoint(last)
        assert not new.exists()
    saver.finish_background_save()
    assert not old.exists()
    assert os.readlink(last) == os.readlink(tmp_path / "first.ckpt") == "new.ckpt"
    assert not saver.is_writing(tmp_path / "first.ckpt")
    assert torch.equal(stored(last)["model.w"], torch.ones(3))
    # And once nothing is under way, at once.
    saver.link_checkpoint(new, tmp_path / "other.ckpt")
    saver.remove_checkpoint(tmp_path / "other.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["first.ckpt", "last.ckpt", "new.ckpt"]


def test_memory_that_is_mapped_from_files_is_copied_to_files(tmp_path: Path) -> None:
    tensor = torch.from_file(str(tmp_path / "slot"), shared=True, size=1 << 20).fill_(3.0)
    buffers = HostBuffers()
    part = {"whole": tensor, "half": tensor[: 1 << 19], "memory": torch.ones(4)}
    boxes = [MetadataIndex(name, (0,)) for name in part]
    values = buffers.copy(boxes, lambda index: part[index.fqn])
    tensor.zero_()
    assert all(values(index).eq(3.0).all() for index in boxes[:2])
    assert [values(index).untyped_storage().filename is not None for index in boxes] == [True, True, False]
    assert os.listdir(tmp_path) == ["slot"]
    assert sum(kept.nbytes for kept in buffers.kept.values()) == (1 << 22) + (1 << 21) + 16
    addresses = [values(index).data_ptr() for index in boxes]
    values = buffers.copy(boxes, lambda index: part[index.fqn])
    assert [values(index).data_ptr() for index in boxes] == addresses, "used again"
    buffers.copy(boxes[2:], lambda index: part[index.fqn])
    assert [kept.nbytes for kept in buffers.kept.values()] == [16]


def test_pinned_copies_share_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SLAB", 4096)
    sources = [torch.ones(n, dtype=dtype) for n, dtype in [(100, torch.float32), (3, torch.bfloat16), (1, torch.int64)]]
    sources += [torch.ones(()), torch.ones(0), torch.ones(2000), torch.ones(700)]
    copies = pinned_like(sources)
    for number, (copy, source) in enumerate(zip(copies, sources, strict=True)):
        assert (copy.shape, copy.dtype) == (source.shape, source.dtype)
        copy.fill_(number)
    assert all(copy.eq(number).all() for number, copy in enumerate(copies)), "two copies overlap"
    sizes = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies if copy.numel()}
    # The first slab has all that fits into one; what does not has memory of its own.
    assert list(sizes.values()) == [2048, 8192, 3072]
