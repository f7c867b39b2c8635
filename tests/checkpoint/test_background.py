"""Saves in the background: what they write, what they wait for, and what happens when they fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.checkpoint import background, save_plan
from lightning_shard.checkpoint.background import HostBuffers, Saver, pinned_like
from lightning_shard.checkpoint.files import tensor_files
from lightning_shard.checkpoint.files.manifest import Contents, Facts, is_checkpoint
from lightning_shard.checkpoint.load import find_checkpoints, open_checkpoint
from lightning_shard.errors import CheckpointError
from lightning_shard.tensors.flat import FlatSlice, FlatTensor
from tests.checkpoint.calls import FACTS
from tests.checkpoint.compare import stored
from tests.harness import DistributedError, run_distributed


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


# Several ranks


def part_of(number: float) -> dict[str, Tensor]:
    """Two tensors that every rank has, and one of its own."""
    tensors = {f"model.w{i}": torch.full((2000,), number) for i in range(2)}
    return tensors | {f"model.{dist.get_rank()}": torch.full((3,), number)}


def save_and_fail(folder: str, failing_rank: int, error: Exception) -> dict[str, Any]:
    """Save, then save in the background with a failure on one rank, in a write, or for want of memory in the copy;
    steps go on until all have been told.
    """
    saver, old, new = Saver(), Path(folder) / "old.ckpt", Path(folder) / "new.ckpt"
    saver.save(str(old), of(part_of(1.0)), background=True)
    saver.finish_background_save()
    owner: Any = HostBuffers if isinstance(error, MemoryError) else tensor_files.HashedFile
    name = "copy" if owner is HostBuffers else "write"
    original = getattr(owner, name)

    def failing(*_: object) -> int:
        raise error

    if dist.get_rank() == failing_rank:
        setattr(owner, name, failing)
    try:
        saver.save(str(new), of(part_of(2.0)), background=True)
        saver.remove_checkpoint(old)
        for step in range(10_000):
            # Ranks come to their steps at different times.
            time.sleep(0.001 * dist.get_rank())
            try:
                saver.poll_background_save()
            except CheckpointError as failure:
                return {"step": step, "said": str(failure), "kind": type(failure).__name__}
            dist.all_reduce(torch.zeros(()))
    finally:
        setattr(owner, name, original)
    raise AssertionError("nobody was told")


@pytest.mark.parametrize(
    ("failing_rank", "error"), [(1, OSError(28, "No space left on device")), (0, MemoryError("of the host"))]
)
def test_a_failure_is_raised_on_all_ranks_in_one_step(tmp_path: Path, failing_rank: int, error: Exception) -> None:
    first, second = run_distributed(save_and_fail, 2, str(tmp_path), failing_rank, error)
    assert first == second
    assert f"rank {failing_rank}: {type(error).__name__}: {error}" in first["said"]
    assert os.listdir(tmp_path) == ["old.ckpt"]
    open_checkpoint(tmp_path / "old.ckpt")


def die_in_the_background(path: str) -> None:
    def die(self: object, data: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    saver = Saver()
    if dist.get_rank() == 0:
        tensor_files.HashedFile.write = die  # type: ignore[method-assign]
    saver.save(path, of(part_of(2.0)), background=True)
    saver.finish_background_save()


def test_a_rank_that_dies_fails_the_others(tmp_path: Path) -> None:
    with pytest.raises(DistributedError) as caught:
        run_distributed(die_in_the_background, 2, str(tmp_path / "a.ckpt"), timeout=60)
    # A rank that waited for the dead one would be "did not end".
    assert caught.value.failed == {0: "died", 1: "CheckpointError"}
    assert not is_checkpoint(tmp_path / "a.ckpt")


def plans_of_saves(folder: str) -> list[int]:
    """How often rank 0 has made a plan after each of several saves; one rank's part changes before the third."""
    made: list[int] = []
    original = save_plan.divide_boxes

    def counted(*args: Any) -> Any:
        made.append(1)
        return original(*args)

    saver, rank, counts = Saver(), dist.get_rank(), []

    def flat(start: int, stop: int) -> FlatTensor:
        return FlatTensor((10,), torch.float32, [FlatSlice(torch.arange(start, stop).float(), start)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_plan, "divide_boxes", counted)
        for number, border in enumerate([5, 5, 7]):
            part = flat(0, border) if rank == 0 else flat(border, 10)
            path = Path(folder) / f"{number}.ckpt"
            saver.save(str(path), of({"model.w": part}), background=number % 2 == 0)
            counts.append(len(made))
            saver.finish_background_save()
            assert torch.equal(stored(path)["model.w"], torch.arange(10.0))
    return counts


def test_a_plan_is_kept_until_a_rank_is_cut_in_another_way(tmp_path: Path) -> None:
    assert run_distributed(plans_of_saves, 2, str(tmp_path)) == [[1, 1, 2], [0] * 3]


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
