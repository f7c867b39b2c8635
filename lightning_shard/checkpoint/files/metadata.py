"""Reading where the tensors of a checkpoint lie, without trusting what says so.

The ``.metadata`` of torch's checkpoints, and of our own before format 3, is a pickle, which can name any function to
call. This reader maps the names that torch's own metadata has to inert records made for one reading; every other name
is refused. The records are then checked against the manifest.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown  # values that share their parts have texts without end
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

from lightning_shard.checkpoint.files.boxes import StoredBoxes, data_files, decode_boxes
from lightning_shard.checkpoint.files.directory import Directory
from lightning_shard.checkpoint.files.layout import BOXES, METADATA, FileEntry, check_relative, damaged_if, dtype_name
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.checkpoint.files.pickles import check_pickle
from lightning_shard.errors import CheckpointCorruptError

_DCP = "torch.distributed.checkpoint.metadata"
_NAMES = "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta"
_RECORDS = {(_DCP, name) for name in _NAMES.split()} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
# What torch's own writer notes besides: items that are no tensors, and the path that was written to.
_FOREIGN_RECORDS = _RECORDS | {(_DCP, "BytesStorageMetadata"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}


def read_boxes(
    directory: Directory, manifest: Manifest, *, share: tuple[int, int] = (0, 1)
) -> Mapping[str, StoredBoxes]:
    """Key to where the tensor lies, of each of the manifest's: by ``boxes.bin``, in older formats by ``.metadata``.

    ``share``: this rank and the number of ranks that open the checkpoint together. Each looks at its part of the
    tensors, whether their boxes make them up.

    Raises CheckpointCorruptError where the file does not match its checksum, names a class that is not torch's
    metadata, or does not describe exactly the manifest's tensors in the manifest's files.
    """
    name = boxes_file(manifest)
    data = directory.read(name, manifest.files)
    with damaged_if(f"{directory.path / name} is no checkpoint metadata", directory.path / name):
        if name == BOXES:
            found = decode_boxes(data, manifest)
            for key in sorted(found)[share[0] :: share[1]]:
                found[key].check_covered(key)
            return found
        tensors = _parse(data, _RECORDS, manifest.files)[1]
        described = {key: (boxes.shape, dtype_name(boxes.dtype)) for key, boxes in tensors.items()}
        listed = {key: (entry.shape, entry.dtype) for key, entry in manifest.tensors.items()}
        if differing := sorted(k for k in described.keys() | listed.keys() if described.get(k) != listed.get(k)):
            raise CheckpointCorruptError(f"it and the manifest describe other tensors: {', '.join(differing[:5])}")
        return tensors


def boxes_file(manifest: Manifest) -> str:
    """The file that `read_boxes` reads."""
    return BOXES if manifest.format_version > 2 else METADATA


@dataclass(frozen=True, kw_only=True)
class ForeignMetadata:
    """A ``.metadata`` that another library wrote, in which not only tensors are described."""

    tensors: Mapping[str, StoredBoxes]
    items: Mapping[str, StorageInfo]  # Key to place of each item that is no tensor.
    paths: Mapping[str, tuple[str | int, ...]]  # Key to where it was in the nested dictionary that was saved.


def parse_foreign_metadata(data: bytes, files: Mapping[str, FileEntry], where: object) -> ForeignMetadata:
    """The contents of a ``.metadata`` without a manifest; ``files`` are those beside it. Errors as of `read_boxes`."""
    with damaged_if(f"{where} is no checkpoint metadata", where):
        root, tensors, items = _parse(data, _FOREIGN_RECORDS, files)
        paths = {key: tuple(root["planner_data"][key]) for key in root["state_dict_metadata"]}
        if not all(type(part) in (str, int) for path in paths.values() for part in path):
            raise CheckpointCorruptError("a key's path is not made of names and numbers")
        return ForeignMetadata(tensors=tensors, items=items, paths=paths)


class _Unpickler(pickle.Unpickler):
    """Knows the names in torch's metadata, each as a record class or function of this instance alone."""

    def __init__(self, data: bytes, records: Iterable[tuple[str, str]]) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data))
        self._known: dict[tuple[str, str], Any] = {known: type(known[1], (_Record,), {}) for known in records}
        # Fresh functions: even an attribute that the pickle sets on one is gone after this reading.
        self._known["torch", "Size"] = lambda sizes=(): tuple(sizes)
        self._known["torch.serialization", "_get_layout"] = lambda name: name
        self._known[_DCP, "_MEM_FORMAT_ENCODING"] = lambda code: code
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as an attribute of it.
        self._known["builtins", "getattr"] = lambda owner, name: name

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; CheckpointCorruptError for a name that torch's metadata does not have."""
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointCorruptError(
            f"it names {module}.{name}, which is not part of a checkpoint's metadata; it was not opened"
        )

    def persistent_load(self, pid: Any) -> Any:
        """No metadata has such an entry."""
        raise CheckpointCorruptError("it refers to an object outside of itself")


class _Record:
    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Whatever it was built from is not looked at."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record) or not isinstance(record.state, dict):
        raise CheckpointCorruptError(f"a {type(record).__name__} stands where a {kind} belongs; only tensors are read")
    return record.state


_Places = dict[tuple[str, tuple[int, ...] | None], StorageInfo]  # By key and offsets of a box; None: no tensor.


def _parse(
    data: bytes, records: Iterable[tuple[str, str]], files: Mapping[str, FileEntry]
) -> tuple[dict[str, Any], dict[str, StoredBoxes], dict[str, StorageInfo]]:
    """The root's fields, key to boxes of each tensor, and key to place of each item that is no tensor."""
    root = _fields(_Unpickler(data, records).load(), "Metadata")
    names, sizes = data_files(files)
    numbers = {name: number for number, name in enumerate(names)}
    places: _Places = {}
    for record, value in root["storage_data"].items():
        index = _fields(record, "MetadataIndex")
        places[index["fqn"], index.get("offset")] = _location(value, files)
    tensors: dict[str, StoredBoxes] = {}
    items: dict[str, StorageInfo] = {}
    for key, value in root["state_dict_metadata"].items():
        if type(value).__name__ == "BytesStorageMetadata":
            items[key] = places[key, None]
        else:
            shape, dtype, rows = _described(key, value, places, numbers)
            table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + 2 * len(shape))
            tensors[key] = StoredBoxes(shape=shape, dtype=dtype, rows=table, files=names).checked(key, sizes)
            tensors[key].check_covered(key)
    return root, tensors, items


def _described(
    key: Any, record: Any, places: _Places, numbers: Mapping[str, int]
) -> tuple[tuple[int, ...], torch.dtype, list[list[int]]]:
    fields = _fields(record, "TensorStorageMetadata")
    shape, dtype, rows = _size(fields["size"]), fields["properties"].state[0], list[list[int]]()
    if type(key) is not str or not isinstance(dtype, torch.dtype):
        raise CheckpointCorruptError(f"{shown(key)} is not described as a tensor")
    for part in (_fields(part, "ChunkStorageMetadata") for part in fields["chunks"]):
        offsets, extent = _size(part["offsets"]), _size(part["sizes"])
        if (place := places.get((key, offsets))) is None:
            raise CheckpointCorruptError(f"{key} has a part at {offsets} that no file holds")
        rows.append([numbers[place.relative_path], place.offset, place.length, *offsets, *extent])
    return shape, dtype, rows


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(length) is int and length >= 0 for length in value):
        raise CheckpointCorruptError(f"{shown(value)} is no shape")
    return value


def _location(record: Any, files: Mapping[str, FileEntry]) -> StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(name) is not str or check_relative(name) not in files:
        raise CheckpointCorruptError(f"it points at {shown(name)}, which the manifest does not list")
    if fields.get("transform_descriptors"):
        raise CheckpointCorruptError("it asks for a stream transform")
    size = files[name].size
    if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0 and offset + length <= size):
        raise CheckpointCorruptError(f"it points outside of {name}")
    return StorageInfo(name, offset, length)
