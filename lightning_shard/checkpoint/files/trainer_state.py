"""``trainer.pt``: everything in a checkpoint except tensors of the model and of optimizers.

It loads with ``weights_only=True``, which is tested on writing. Plain containers that ``weights_only=True`` refuses
(numpy arrays, ``deque``, ``defaultdict``, ``frozenset``) are written as a dictionary with `_KIND`.
"""

import copy
import io
import os
import re
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.files.layout import TRAINER_STATE, Directory, damaged_if
from lightning_shard.checkpoint.files.location import Location
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.errors import CheckpointCorruptError, CheckpointError
from lightning_shard.text import first_line

_REPEATED_BYTES = 1 << 24  # most of a tensor that repeats its values
_KIND = "lightning_shard.kind"
_FACTORIES = {"None": None, **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}}


def encode_trainer_state(state: Mapping[str, Any], *, stock: bool = False) -> bytes:
    """Return the bytes of ``trainer.pt``. CheckpointError: values that would not load, or load as others in ``stock``
    Lightning.
    """
    data, problem = _encode(dict(state))
    if problem is not None:
        data, problem = _encode(state := _plain(dict(state), stock))
    if problem is None:
        return data
    offenders = _offenders(state, "")[:5] or [f"{problem}"]
    raise CheckpointError(
        "the trainer's state can't be saved so that it loads without running code (torch.load with "
        f"weights_only=True): {'; '.join(offenders)}. Convert it to numbers, strings, tensors and containers of "
        "them (str(path) for a path, tensor.full_tensor() for a DTensor), or allow the class with "
        "torch.serialization.add_safe_globals."
    )


def can_be_saved(value: Any) -> bool:
    return _encode(value)[1] is None or _encode(_plain(value, stock=False))[1] is None


def read_trainer_state(directory: Directory, manifest: Manifest) -> dict[str, Any]:
    return decode_state(directory.read(TRAINER_STATE, manifest.files), directory.path / TRAINER_STATE)


def decode_state(data: bytes, where: Location) -> dict[str, Any]:
    """Reverse `encode_trainer_state`, on the CPU. CheckpointCorruptError: changed bytes, or ones that name a class."""
    with damaged_if(partial(refusal, where)):
        state = load_archive(io.BytesIO(data), where)
        state = _restored(state) if _KIND.encode() in data else state
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{where} holds a {type(state).__name__}, not a dictionary")
    return state


def load_archive(file: Path | BinaryIO, where: Location) -> Any:
    """Load a file of ``torch.save``, tensors on the CPU. Nothing in it runs.

    Of a path, records are compared with their CRC-32 and tensors are mapped.
    CheckpointCorruptError: damaged, compressed or overlapping records, or tensors that are larger than the file.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if packed := [info for info in records if info.compress_type != zipfile.ZIP_STORED]:
            raise CheckpointCorruptError(
                f"{where} is compressed ({packed[0].filename}), which torch.save never does, and its tensors can't be "
                "read one at a time: unpack it and zip it again without compression (zip -0)"
            )
        assert archive.fp is not None
        size = archive.fp.seek(0, os.SEEK_END)
        if sum(info.file_size for info in records) > size:
            raise CheckpointCorruptError(f"{where} has records that lie in each other")
        if isinstance(file, Path) and (bad := archive.testzip()) is not None:
            raise CheckpointCorruptError(f"{where} is damaged: Bad CRC-32 for file {bad!r}. Use another checkpoint.")
    if not isinstance(file, Path):
        file.seek(0)
    value = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    dense = (part for part in parts(value) if isinstance(part, Tensor) and part.layout == torch.strided)
    if any(tensor.nbytes > 2 * size + _REPEATED_BYTES for tensor in dense):
        raise CheckpointCorruptError(f"{where} has {size} bytes, and a tensor of many more in them")
    return value


def refusal(path: object, error: Exception) -> str:
    """Describe in one sentence why ``torch.load`` refused ``path``, with the name of a refused class."""
    named = re.search(r"GLOBAL (\S+) was not an allowed|unsupported GLOBAL (\S+)|Unsupported class (\S+)", str(error))
    if named is None:
        return f"{path} can't be read: {first_line(error)}"
    return (
        f"{path} names {next(filter(None, named.groups()))}, which no checkpoint needs; it was refused and nothing in "
        "it ran. If you wrote it and need the class: torch.serialization.add_safe_globals"
    )


def _encode(value: Any) -> tuple[bytes, str | None]:
    """Return the bytes of ``value`` and None, or no bytes and the problem."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        return b"", first_line(error)
    # Only rank 0's shard of a DTensor would be written.
    return buffer.getvalue(), "a DTensor" if any(isinstance(part, DTensor) for part in parts(value)) else None


def _plain(value: Any, stock: bool) -> Any:
    """Replace numpy's numbers, and containers that `_restored` restores, by values that ``weights_only=True`` loads."""
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (dict, OrderedDict):
        new = copy.copy(value)  # keeps the attributes of a module's state_dict
        new.clear()
        new.update(
            (key.item() if isinstance(key, np.generic) else key, _plain(each, stock)) for key, each in value.items()
        )
        return new
    if kind in (list, tuple, set):
        return kind(_plain(part, stock or kind is set) for part in value)
    if stock:
        return value
    if kind is np.ndarray and value.dtype.kind not in "OV":
        data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {_KIND: "ndarray", "dtype": value.dtype.str, "shape": value.shape, "data": data}
    if kind is deque:
        return {_KIND: "deque", "parts": [_plain(part, stock) for part in value], "maxlen": value.maxlen}
    if kind is defaultdict and value.default_factory in _FACTORIES.values():
        name = getattr(value.default_factory, "__name__", "None")
        return {_KIND: "defaultdict", "parts": _plain(dict(value), stock), "factory": name}
    return {_KIND: "frozenset", "parts": [_plain(part, True) for part in value]} if kind is frozenset else value


def _restored(value: Any) -> Any:
    """Reverse `_plain`, except for numbers. Lists and dictionaries are changed in place."""
    if type(value) is tuple:
        return tuple(map(_restored, value))
    if type(value) in (dict, OrderedDict):
        value.update([(key, _restored(part)) for key, part in value.items()])
        kind = value.get(_KIND)
        if kind == "ndarray":
            return value["data"].numpy().view(np.dtype(str(value["dtype"]))).reshape(value["shape"])
        if kind == "deque":
            return deque(value["parts"], value["maxlen"])
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[value["factory"]], value["parts"])
        return frozenset(value["parts"]) if kind == "frozenset" else value
    if type(value) is list:
        value[:] = map(_restored, value)
    return value


def _offenders(value: Any, path: str) -> list[str]:
    """Return ``path: type`` for every innermost part of ``value`` that can't be saved or loaded."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = enumerate(value)
    bad = [(f"{path}/{name}" if path else f"{name}", child) for name, child in children if _encode(child)[1]]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [each for where, child in bad for each in _offenders(child, where)] or [f"{path or 'top level'}: {kind}"]


def parts(value: Any) -> Iterator[Any]:
    """Yield the innermost parts of ``value``, or ``value`` itself."""
    if isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from parts(part)
    else:
        yield value
