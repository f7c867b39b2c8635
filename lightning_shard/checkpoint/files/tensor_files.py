"""torch.distributed.checkpoint files: boxes of tensors, written one at a time and read into live tensors in place.

The files are like those of torch's ``FileSystemWriter`` (each item a ``torch.save`` of one box), so that torch's tools
read them. But a file is hashed while it is written, at most two boxes are on the host at a time, and only checked files
are read. An object that stands for a tensor has ``shape``, ``dtype`` and two methods of torch's checkpointable protocol
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
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from lightning_shard import errors
from lightning_shard.checkpoint.files.boxes import (
    Integers,
    PlannedBoxes,
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

ReadBox = Callable[[dcp.MetadataIndex], Tensor]  # returns the values of a box that this rank writes
_LENGTH_BYTES = 8
_VERSION = "1.0.0"  # of these files, in torch.distributed.checkpoint
_MOST_IN_METADATA = 200_000  # boxes: 35 MB, and as much time on rank 0 as for millions as numbers


class HashedFile:
    """A new file that is hashed while it is written, and synced on exit."""

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
                if isinstance(self._stream, io.BufferedWriter):  # an object in a store is durable at once
                    os.fsync(self._stream.fileno())
            return
        with contextlib.suppress(Exception):  # buffered bytes can't be written either
            if isinstance(self._stream, AbstractBufferedFile):
                self._stream.closed = True  # otherwise its finalizer makes the object appear
                self._stream.discard()
            else:
                self._stream.close()
        if self._failure is not None and error is not self._failure:
            # torch.save hides the cause: it still ends its archive, then complains about a wrong position.
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
        """Do nothing for ``torch.save``. The bytes reach the disk on exit."""

    def tell(self) -> int:
        return self._size

    def entry(self) -> FileEntry:
        sha256, block = self._hash.entry()
        return FileEntry(size=self._size, sha256=sha256, block=block)


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """The files that one rank wrote."""

    places: Integers  # (boxes, 2): offset and length of each box in the rank's file, in the order of the plan
    files: Mapping[str, FileEntry]


def data_file(rank: int) -> str:
    return f"__{rank}_0{DATA_SUFFIX}"


def write_boxes(
    directory: Location, rank: int, boxes: Sequence[dcp.MetadataIndex], values: ReadBox, own_state: bytes = b""
) -> WrittenFiles:
    """Write boxes, then ``own_state`` if any, into this rank's file."""
    places = np.zeros((len(boxes), 2), dtype=np.int64)
    if not boxes and not own_state:
        return WrittenFiles(places=places, files={})
    with HashedFile(directory / data_file(rank)) as stream:
        for number, box in enumerate(_host_copies(map(values, boxes))):
            start = stream.tell()
            torch.save(box, cast(BinaryIO, stream))
            places[number] = start, stream.tell() - start
        if own_state:
            stream.write(own_state + len(own_state).to_bytes(_LENGTH_BYTES, "little"))
    return WrittenFiles(places=places, files={data_file(rank): stream.entry()})


def read_own_state(directory: Directory, rank: int) -> dict[str, Any]:
    """Read the state that ``rank`` wrote after its boxes. CheckpointCorruptError if there is none."""
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
    """Yield the boxes on the host, row-major, each in a storage of its own size. It is valid until the next one.

    A box of a device is copied to pinned memory while the caller uses the one before.
    """
    ahead: list[Callable[[], Tensor]] = []
    for box in boxes:
        box = box.detach().resolve_conj().resolve_neg().contiguous()
        if box.device.type != "cpu":
            ahead.append(_copy_to_host(box))
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


def _copy_to_host(box: Tensor) -> Callable[[], Tensor]:
    """Start copying a box to pinned memory. Returned: a function that waits for the copy and returns it."""
    # torch caches freed pinned memory, so that later boxes of about this size reuse it.
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


def describe_boxes(planned: PlannedBoxes, written: Sequence[WrittenFiles]) -> dict[str, bytes]:
    """Return the contents of ``boxes.bin``, and of ``.metadata`` unless it is too large. ``written``: by rank."""
    names, _ = data_files({name: entry for part in written for name, entry in part.files.items()})
    numbers = {name: number for number, name in enumerate(names)}
    file_of_rank = np.array([numbers.get(data_file(rank), -1) for rank in range(len(written))], dtype=np.int64)
    counts = [len(part.places) for part in written]
    files = np.repeat(file_of_rank, counts)
    places = np.concatenate([files[:, None], np.concatenate([part.places for part in written])], axis=1)
    if not planned.described or not np.array_equal(planned.described[0], places):
        first_of_rank, tables = np.cumsum([0, *counts]), []
        for facts, planned_rows in planned.tables:
            rows = planned_rows.copy()
            rows[:, :3] = places[first_of_rank[rows[:, 0]] + rows[:, 1]]
            tables.append((facts, rows))
        described = {BOXES: encode_boxes(rows for _, rows in tables)}
        if len(places) <= _MOST_IN_METADATA:
            described[METADATA] = _metadata(tables, names)
        planned.described[:] = [places, described]
    return planned.described[1]


def _metadata(tables: Iterable[tuple[TensorFacts, Integers]], names: Sequence[str]) -> bytes:
    """Return ``.metadata``, without the writer's path or a random number."""
    # Tensors of one shape and the same boxes share a description, which a pickle then has once.
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
            vars(index)["offset"] = chunk.offsets  # share the object, which it has copied
            places[index] = StorageInfo(names[file], start, length)
    metadata = Metadata(tensors, storage_data=places, storage_meta=dcp.StorageMeta(), version=_VERSION)
    # Put last: a pickle refers to its first objects, the classes of places, in fewer bytes.
    vars(metadata)["state_dict_metadata"] = vars(metadata).pop("state_dict_metadata")
    return pickle.dumps(metadata)


def chunks_of(tensor: Any) -> list[dcp.ChunkStorageMetadata]:
    """Return this rank's boxes of a plain tensor, a DTensor, or an object that stands for a tensor."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return []
    if hasattr(tensor, "__create_chunk_list__"):
        return list(tensor.__create_chunk_list__())
    assert isinstance(tensor, Tensor)
    return [dcp.ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.size())]


class _Copy(NamedTuple):
    """A part of a stored box that goes into a live one."""

    row: list[int]  # of `StoredBoxes`
    dtype: torch.dtype
    low: list[int]  # the overlap of both boxes
    high: list[int]
    live: dcp.MetadataIndex
    target: Any


@torch.no_grad()
def read_tensors(directory: Directory, stored: Mapping[str, StoredBoxes], targets: Iterable[tuple[str, Any]]) -> None:
    """Fill this rank's boxes of each target from the stored tensor of its key, casting.

    Each file is read front to back, each stored box once, and one box is in memory at a time. CheckpointCorruptError: a
    file differs from ``stored``, which was checked. CheckpointMismatchError: a target of another shape.
    """
    by_file: dict[str, list[_Copy]] = {}
    for key, target in targets:
        boxes = stored[key]
        if boxes.shape != tuple(target.shape):
            raise errors.CheckpointMismatchError(f"{key} has shape {boxes.shape} there, {tuple(target.shape)} here")
        for position, chunk in enumerate(chunks_of(target)):
            live = dcp.MetadataIndex(key, chunk.offsets, position)
            for row, low, high in boxes.meeting(chunk):
                copy = _Copy(row, boxes.dtype, low, high, live, target)
                by_file.setdefault(boxes.files[row[0]], []).append(copy)
    for name, copies in by_file.items():
        with directory.open(name) as stream:
            last, stored_box = -1, torch.empty(0)
            for row, dtype, low, high, live, target in sorted(copies, key=lambda copy: copy.row[1]):
                if row[1] != last:
                    stored_box = torch.empty(0)  # free the last box before the next is read
                    stored_box, last = _read_box(stream, directory, name, row, dtype, live.fqn), row[1]
                part = _narrow(find_tensor_shard(target, live), live.offset or (), low, high)
                part.detach().copy_(_narrow(stored_box, row[3:], low, high))


@torch.no_grad()
def fill(key: str, target: Any, values: Callable[[Sequence[int], Sequence[int]], Tensor]) -> None:
    """Fill each box of a target that this rank has with ``values(offsets, sizes)``, casting."""
    for position, chunk in enumerate(chunks_of(target)):
        if chunk.sizes.numel() > 0:
            box = find_tensor_shard(target, dcp.MetadataIndex(key, chunk.offsets, position))
            box.detach().copy_(values(chunk.offsets, chunk.sizes))


def _narrow(box: Tensor, offsets: Sequence[int], low: Sequence[int], high: Sequence[int]) -> Tensor:
    """View the elements from ``low`` to ``high`` of a box that begins at ``offsets``."""
    for dim, (first, last) in enumerate(zip(low, high, strict=True)):
        box = box.narrow(dim, first - offsets[dim], last - first)
    return box


class _Part(io.RawIOBase):
    """``length`` bytes of a file from ``start``, as a file."""

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


def _read_box(
    stream: BinaryIO, directory: Directory, name: str, row: Sequence[int], dtype: torch.dtype, key: str
) -> Tensor:
    path, (start, length), shape = directory.path / name, row[1:3], tuple(row[3 + (len(row) - 3) // 2 :])
    try:
        part: Any = _Part(stream, start, length)
        if length <= directory.at_once_bytes:
            stream.seek(start)
            part = io.BytesIO(stream.read(length))  # faster by far
        box = load_archive(part, path)
    except Exception as error:
        if isinstance(error, (errors.CheckpointReplacedError, errors.CheckpointUnreachableError)):
            raise  # the bytes did not come
        raise errors.CheckpointCorruptError(f"{path}: {key} can't be read: {error}") from error
    if not isinstance(box, Tensor) or tuple(box.shape) != shape or box.dtype != dtype:
        raise errors.CheckpointCorruptError(f"{path}: {key} is not a {dtype} tensor of shape {shape}")
    return box


def read_full(directory: Directory, stored: Mapping[str, StoredBoxes], key: str) -> Tensor:
    """Read the full tensor ``key`` into new host memory. One stored box is in memory besides."""
    tensor = torch.empty(stored[key].shape, dtype=stored[key].dtype)
    read_tensors(directory, stored, [(key, tensor)])
    return tensor
