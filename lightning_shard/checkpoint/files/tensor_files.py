"""torch.distributed.checkpoint files: boxes of tensors, written one at a time and read into live tensors in place.

The files are those of torch's own ``FileSystemWriter`` (each item a ``torch.save`` of one box), so that torch's tools
read them; but a file is hashed while it is written, at most two boxes are on the host at a time, and only checked files
are read. What stands for a tensor has ``shape``, ``dtype`` and two methods of torch's checkpointable protocol
(``torch/distributed/_checkpointable.py``): ``__create_chunk_list__`` and ``__get_tensor_shard__``.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from fsspec.spec import AbstractBufferedFile
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_shard import errors
from lightning_shard.checkpoint.files.boxes import (
    BoxesByRank,
    StorageInfo,
    StoredBoxes,
    TensorFacts,
    data_files,
    encode_boxes,
)
from lightning_shard.checkpoint.files.hashing import FileHash
from lightning_shard.checkpoint.files.layout import BOXES, DATA_SUFFIX, METADATA, Directory, FileEntry, damaged_if
from lightning_shard.checkpoint.files.location import Location
from lightning_shard.checkpoint.files.trainer_state import decode_state, load_archive

Values = Callable[[dcp.MetadataIndex], Tensor]  # Gives the values of a box that this rank is to write.
_LENGTH_BYTES = 8
_VERSION = "1.0.0"  # torch.distributed.checkpoint's, of these files
_MOST_IN_METADATA = 200_000  # boxes: 35 MB, for which rank 0 takes as long as for millions as numbers


class HashedFile:
    """A new file that is hashed while it is written and synced when closed."""

    def __init__(self, path: Location) -> None:
        self._stream = path.open("xb")  # closed by __exit__
        self._hash, self._size = FileHash(), 0
        self._failure: OSError | None = None

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            with self._stream:
                self._stream.flush()
                if isinstance(self._stream, io.BufferedWriter):  # an object is durable once it is there
                    os.fsync(self._stream.fileno())
            return
        with contextlib.suppress(Exception):  # what is still buffered can't be written either
            if isinstance(self._stream, AbstractBufferedFile):
                self._stream.closed = True  # else an object appears when the last reference to it goes
                self._stream.discard()
            else:
                self._stream.close()
        if self._failure is not None and error is not self._failure:
            # torch.save hides the cause: it goes on to end its archive and then complains about a wrong position.
            raise self._failure from error

    def write(self, data: Any) -> int:
        hashed = self._hash.begin_update(data)
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._failure = self._failure or error
            raise
        finally:
            for job in hashed:
                job.result()
        self._size += written
        return written

    def flush(self) -> None:
        """For ``torch.save``; the bytes reach the disk on close."""

    def tell(self) -> int:
        return self._size

    def entry(self) -> FileEntry:
        sha256, block = self._hash.entry()
        return FileEntry(size=self._size, sha256=sha256, block=block)


@dataclass(frozen=True, kw_only=True)
class Written:
    # Offset and length of each of its boxes in its file, in the order in which it was given them: shape ``(boxes, 2)``.
    places: NDArray[np.int64]
    files: Mapping[str, FileEntry]


def data_file(rank: int) -> str:
    return f"__{rank}_0{DATA_SUFFIX}"


def write_boxes(
    directory: Location, rank: int, boxes: Sequence[dcp.MetadataIndex], values: Values, own_state: bytes = b""
) -> Written:
    """Write boxes, then ``own_state``, if any, into this rank's file."""
    places = np.zeros((len(boxes), 2), dtype=np.int64)
    if not boxes and not own_state:
        return Written(places=places, files={})
    with HashedFile(directory / data_file(rank)) as stream:
        for number, box in enumerate(_host_copies(map(values, boxes))):
            start = stream.tell()
            torch.save(box, cast(BinaryIO, stream))
            places[number] = start, stream.tell() - start
        if own_state:
            stream.write(own_state + len(own_state).to_bytes(_LENGTH_BYTES, "little"))
    return Written(places=places, files={data_file(rank): stream.entry()})


def read_own_state(directory: Directory, rank: int) -> dict[str, Any]:
    """What ``rank`` wrote behind its boxes; CheckpointCorruptError where there is nothing of the kind."""
    where = directory.path / data_file(rank)
    with directory.open(where.name) as stream, damaged_if(f"{where} can't be read"):
        end = stream.seek(0, os.SEEK_END) - _LENGTH_BYTES
        stream.seek(max(end, 0))
        length = int.from_bytes(stream.read(), "little")
        if not 0 < length <= end:
            raise errors.CheckpointCorruptError(f"{where} does not end with the state of rank {rank}")
        stream.seek(end - length)
        data = stream.read(length)
    return decode_state(data, where)


def _host_copies(boxes: Iterable[Tensor]) -> Iterator[Tensor]:
    """The boxes on the host, in row-major order, each in a storage of its own size, which the caller is done with when
    it asks for the next one. A box of a device is copied to pinned memory while the caller uses the one before.
    """
    ahead: list[Callable[[], Tensor]] = []
    for box in boxes:
        box = box.detach().resolve_conj().resolve_neg().contiguous()
        if box.device.type != "cpu":
            ahead.append(_begin_copy(box))
            if len(ahead) < 2:
                continue
        elif box.untyped_storage().nbytes() != box.nbytes:
            box = box.clone(memory_format=torch.contiguous_format)
        if ahead:
            yield ahead.pop(0)()
        if box.device.type == "cpu":
            yield box
    if ahead:
        yield ahead.pop()()


def _begin_copy(box: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a box to pinned memory; returns a function that waits for the copy and gives it."""
    # torch keeps pinned memory that was freed, so that later boxes of about this size get the same.
    host = torch.empty(box.shape, dtype=box.dtype, pin_memory=True)
    host.copy_(box, non_blocking=True)
    copied = torch.accelerator.current_stream(box.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


def write_file(path: Location, data: bytes) -> FileEntry:
    with HashedFile(path) as stream:
        stream.write(data)
    return stream.entry()


def describe_boxes(boxes: BoxesByRank, written: Sequence[Written]) -> dict[str, bytes]:
    """The contents of ``boxes.bin``, and of ``.metadata`` where it is not too large; ``written``: by rank."""
    names, _ = data_files({name: entry for part in written for name, entry in part.files.items()})
    numbers = {name: number for number, name in enumerate(names)}
    of_rank = np.array([numbers.get(data_file(rank), -1) for rank in range(len(written))], dtype=np.int64)
    files = np.repeat(of_rank, boxes.counts)
    places = np.concatenate([files[:, None], np.concatenate([part.places for part in written])], axis=1)
    if not boxes.described or not np.array_equal(boxes.described[0], places):
        tables = list(boxes.tables(places))
        described = {BOXES: encode_boxes(rows for _, rows in tables)}
        if len(places) <= _MOST_IN_METADATA:
            described[METADATA] = _metadata(tables, names)
        boxes.described[:] = [places, described]
    return boxes.described[1]


def _metadata(tables: Iterable[tuple[TensorFacts, NDArray[np.int64]]], names: Sequence[str]) -> bytes:
    """``.metadata``, with no path of the machine that wrote it and no random number."""
    # Tensors of one shape and the same boxes have one description: a pickle has it once.
    described: dict[Any, dcp.TensorStorageMetadata] = {}
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    places = {}
    for facts, rows in tables:
        ndim, form = len(facts.shape), (facts.dtype, facts.shape, rows[:, 3:].tobytes())
        if form not in described:
            boxes = [(torch.Size(box[:ndim]), torch.Size(box[ndim:])) for box in rows[:, 3:].tolist()]
            chunks = [dcp.ChunkStorageMetadata(*box) for box in boxes]
            described[form] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=facts.dtype), torch.Size(facts.shape), chunks
            )
        tensors[facts.key] = described[form]
        for chunk, (file, start, length) in zip(described[form].chunks, rows[:, :3].tolist(), strict=True):
            index = dcp.MetadataIndex(facts.key, chunk.offsets)
            vars(index)["offset"] = chunk.offsets  # of which it has made a copy
            places[index] = StorageInfo(names[file], start, length)
    metadata = Metadata(tensors, storage_data=places, storage_meta=dcp.StorageMeta(), version=_VERSION)
    # Last: a pickle refers in fewer bytes to what it has first, the names of the classes of places.
    vars(metadata)["state_dict_metadata"] = vars(metadata).pop("state_dict_metadata")
    return pickle.dumps(metadata)


def chunks_of(tensor: Any) -> list[dcp.ChunkStorageMetadata]:
    """The boxes of a tensor that this rank has: a plain tensor, a DTensor, or what stands for one."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    if hasattr(tensor, "__create_chunk_list__"):
        return list(tensor.__create_chunk_list__())
    assert isinstance(tensor, Tensor)
    return [dcp.ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.size())]


class _Read(NamedTuple):
    start: int  # First byte of the stored box in its file.
    length: int
    begin: Sequence[int]  # Offsets and sizes of the stored box.
    sizes: Sequence[int]
    dtype: torch.dtype
    low: Sequence[int]  # Where what both have in common begins and ends.
    high: Sequence[int]
    live: dcp.MetadataIndex
    target: Any


@torch.no_grad()
def read_tensors(directory: Directory, stored: Mapping[str, StoredBoxes], targets: Iterable[tuple[str, Any]]) -> None:
    """Fill this rank's boxes of each target from the stored tensor of the key beside it, casting; each file is read
    front to back, each stored box once, and one is in memory at a time. CheckpointCorruptError: a file has something
    else than ``stored``, which was checked, says; CheckpointMismatchError: a target of another shape.
    """
    by_file: dict[str, list[_Read]] = {}
    for key, target in targets:
        boxes = stored[key]
        if boxes.shape != tuple(target.shape):
            raise errors.CheckpointMismatchError(f"{key} has shape {boxes.shape} there, {tuple(target.shape)} here")
        for position, chunk in enumerate(chunks_of(target)):
            live = dcp.MetadataIndex(key, chunk.offsets, position)
            for (file, start, length, *box), low, high in boxes.meeting(chunk):
                read = _Read(start, length, box[: len(low)], box[len(low) :], boxes.dtype, low, high, live, target)
                by_file.setdefault(boxes.files[file], []).append(read)
    for name, reads in by_file.items():
        with directory.open(name) as stream:
            last, stored_box = -1, torch.empty(0)
            for read in sorted(reads, key=lambda read: read.start):
                if read.start != last:
                    stored_box = torch.empty(0)  # free the last box before the next is read
                    stored_box, last = _read_box(stream, directory, name, read), read.start
                part = _narrow(find_tensor_shard(read.target, read.live), read.live.offset or (), read.low, read.high)
                part.detach().copy_(_narrow(stored_box, read.begin, read.low, read.high))


@torch.no_grad()
def fill(key: str, target: Any, values: Callable[[Sequence[int], Sequence[int]], Tensor]) -> None:
    """Copy into each box of a target that this rank has what ``values`` gives for its offsets and sizes, casting."""
    for position, chunk in enumerate(chunks_of(target)):
        if chunk.sizes.numel() > 0:
            box = find_tensor_shard(target, dcp.MetadataIndex(key, chunk.offsets, position))
            box.detach().copy_(values(chunk.offsets, chunk.sizes))


def _narrow(box: Tensor, offsets: Sequence[int], low: Sequence[int], high: Sequence[int]) -> Tensor:
    """What a box that begins at ``offsets`` has of the elements from ``low`` to ``high``."""
    for dim, (first, last) in enumerate(zip(low, high, strict=True)):
        box = box.narrow(dim, first - offsets[dim], last - first)
    return box


class _Part(io.RawIOBase):
    """``length`` bytes of a file from ``start`` on, as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise OSError(f"byte {at} of a part of a file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        wanted = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        count = self._stream.readinto(wanted)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


def _read_box(stream: BinaryIO, directory: Directory, name: str, read: _Read) -> Tensor:
    path, key = directory.path / name, read.live.fqn
    try:
        part: Any = _Part(stream, read.start, read.length)
        if read.length <= directory.at_once_bytes:
            stream.seek(read.start)
            part = io.BytesIO(stream.read(read.length))  # faster by far
        box = load_archive(part, path)
    except Exception as error:
        if isinstance(error, (errors.CheckpointReplacedError, errors.CheckpointUnreachableError)):
            raise  # The bytes did not come.
        raise errors.CheckpointCorruptError(f"{path}: {key} can't be read: {error}") from error
    if not isinstance(box, Tensor) or list(box.shape) != read.sizes or box.dtype != read.dtype:
        raise errors.CheckpointCorruptError(f"{path}: {key} is not a {read.dtype} tensor of shape {tuple(read.sizes)}")
    return box


def read_full(directory: Directory, stored: Mapping[str, StoredBoxes], key: str) -> Tensor:
    """The full tensor ``key``, new and on the host; beside it one stored box is in memory at a time."""
    tensor = torch.empty(stored[key].shape, dtype=stored[key].dtype)
    read_tensors(directory, stored, [(key, tensor)])
    return tensor
