"""``trainer.pt``: everything in a checkpoint that is not a tensor of the model or an optimizer.

It must load with ``weights_only=True``, which is seen to when it is written. A pickle is looked at before it is opened,
because unpicklers that refuse functions still follow a few bytes into exponential work (a tuple of a tuple twice, forty
deep, as the key of a dictionary), the end of the stack (tuples a million deep) and gigabytes (``bytearray(2**33)``, a
place in the memo beyond all objects).

What ``weights_only=True`` lacks among plain containers (numpy arrays, ``deque``, ``defaultdict``, ``frozenset``) is
written as a dictionary with `_KIND`, and read as what it was.
"""

import copy
import io
import math
import os
import pickletools
import re
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
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

_MOST_BYTES = 1 << 24  # of a tensor that repeats its values
_KIND = "lightning_shard.kind"
_FACTORIES = {"None": None, **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}}


def encode_trainer_state(state: Mapping[str, Any], *, stock: bool = False) -> bytes:
    """The bytes of ``trainer.pt``. CheckpointError: what would not load, or be another value in ``stock`` Lightning."""
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
    """Whether ``trainer.pt`` can have ``value`` in it."""
    return _encode(value)[1] is None or _encode(_plain(value, stock=False))[1] is None


def read_trainer_state(directory: Directory, manifest: Manifest) -> dict[str, Any]:
    """The contents of ``trainer.pt``, as of `decode_state`."""
    return decode_state(directory.read(TRAINER_STATE, manifest.files), directory.path / TRAINER_STATE)


def decode_state(data: bytes, where: Location) -> dict[str, Any]:
    """What `encode_trainer_state` was given, on the CPU. CheckpointCorruptError: changed, or it names a class."""
    with damaged_if(partial(refusal, where)):
        state = load_archive(io.BytesIO(data), where)
        tensors = [part for part in parts(state) if isinstance(part, Tensor) and part.layout == torch.strided]
        if any(tensor.nbytes > 2 * len(data) + _MOST_BYTES for tensor in tensors):
            raise CheckpointCorruptError(f"{where} has {len(data)} bytes, and a tensor of many more in them")
        state = _restored(state) if _KIND.encode() in data else state
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{where} holds a {type(state).__name__}, not a dictionary")
    return state


def load_archive(file: BinaryIO, where: Location) -> Any:
    """What ``torch.save`` wrote to ``file``, tensors on the CPU, after `check_archive`; nothing in it runs."""
    check_archive(file, where)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=False)


def check_archive(file: Path | BinaryIO, where: Location) -> list[zipfile.ZipInfo]:
    """The records of a file of ``torch.save``, which takes no more memory than it has bytes, nor time without end.
    CheckpointCorruptError: a record is compressed or lies in another one, or as `check_pickle`.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if packed := [info for info in records if info.compress_type != zipfile.ZIP_STORED]:
            raise CheckpointCorruptError(
                f"{where} is compressed ({packed[0].filename}), which torch.save never does, and its tensors can't be "
                "read one at a time: unpack it and zip it again without compression (zip -0)"
            )
        assert archive.fp is not None
        if sum(info.file_size for info in records) > archive.fp.seek(0, os.SEEK_END):
            raise CheckpointCorruptError(f"{where} has records that lie in each other")
        for info in records:
            if info.filename.endswith("data.pkl"):
                try:
                    check_pickle(archive.read(info))
                except CheckpointCorruptError as error:
                    raise CheckpointCorruptError(f"{where} was refused: {error}") from error
    return records


def refusal(path: object, error: Exception) -> str:
    """One sentence on what ``torch.load`` refused in ``path``, with the name of the class, if it was one."""
    named = re.search(r"GLOBAL (\S+) was not an allowed|unsupported GLOBAL (\S+)|Unsupported class (\S+)", str(error))
    if named is None:
        return f"{path} can't be read: {first_line(error)}"
    return (
        f"{path} names {next(filter(None, named.groups()))}, which no checkpoint needs; it was refused and nothing in "
        "it ran. If you wrote it and need the class: torch.serialization.add_safe_globals"
    )


def _encode(value: Any) -> tuple[bytes, str | None]:
    """The bytes of ``value`` and None, or what is wrong with it."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        return b"", first_line(error)
    # Of a DTensor only rank 0's shard would be written.
    return buffer.getvalue(), "a DTensor" if any(isinstance(part, DTensor) for part in parts(value)) else None


def _plain(value: Any, stock: bool) -> Any:
    """``value`` with what ``weights_only=True`` loads in the place of numpy's numbers and what `_restored` makes."""
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (dict, OrderedDict):
        new = copy.copy(value)  # with the attributes that a module's state_dict has
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
    """What `_plain` was given, but for numbers; containers of ``value`` are filled anew."""
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
    """``path: type`` for every innermost part of ``value`` that can't be saved or loaded."""
    if _encode(value)[1] is None:
        return []
    where, found, children = path or "top level", list[str](), list[tuple[Any, Any]]()
    if isinstance(value, Mapping):
        children = list(value.items())
        found = [f"{where}: key {k!r} of type {_type_name(k)}" for k in value if _encode(k)[1] is not None]
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(enumerate(value))
    for name, child in children:
        found += _offenders(child, f"{path}/{name}" if path else f"{name}")
    return found or [f"{where}: {_type_name(value)}"]


def parts(value: Any) -> Iterator[Any]:
    """The innermost parts of ``value``, or itself."""
    if isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from parts(part)
    else:
        yield value


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


_DEEPEST = 200
_MARK = object()
_CALLS = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"}
_HASHED = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}  # What may be a key, and is whole when it is made.
_ADDS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_REFUSED = {"DUP", "INST", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
_PLACES = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_TAKES = {op.name: len(op.stack_before) - (op.name in _ADDS) for op in pickletools.opcodes}  # Objects off the stack.
_TO_MARK = {op.name for op in pickletools.opcodes if pickletools.markobject in op.stack_before}


class _Value:
    """An object with others in it, or a function. A leaf is what the pickle says of it."""

    __slots__ = ("depth", "name", "parts", "size")

    def __init__(self, parts: list[Any], name: str = "") -> None:
        self.parts, self.name = parts, name
        self.depth, self.size = 1, 1


def check_pickle(data: bytes) -> None:
    """Raise CheckpointCorruptError where opening ``data`` would take memory or time without end, whatever it calls.
    Other errors (IndexError, KeyError, ValueError, RecursionError) say that it is no pickle that is read.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    left = 1_000_000 + 4 * len(data)
    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        name = opcode.name
        if name in _PLACES:
            if (number := len(memo) if arg is None else arg) > len(data):
                raise CheckpointCorruptError(f"it numbers an object {number} in {len(data)} bytes")
            memo[number] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "STOP":
            count, depth = _unfolded(stack[-1], {})
            if count > left or depth > _DEEPEST:
                raise CheckpointCorruptError("its parts stand in each other without end")
        elif name == "GLOBAL":
            stack.append(_Value([], arg.rpartition(" ")[2]))
        elif name.startswith("EMPTY"):
            stack.append(_Value([]))
        elif name == "PERSID":
            return  # every reader refuses it
        elif name in _REFUSED:
            raise ValueError(f"{name} is in no checkpoint")
        elif not opcode.stack_before:
            stack.extend([arg] if opcode.stack_after else [])
        else:
            taken = _take(stack, name)
            if name in _ADDS:
                if not stack[-1].name:
                    stack[-1].parts.extend(taken)
                continue
            if name in _CALLS:
                _check_call(len(data), *taken)
            value = _Value(taken, str(taken[-1]) if name == "STACK_GLOBAL" else "")
            if name in _HASHED:
                inside = [part for part in taken if isinstance(part, _Value)]
                value.depth = 1 + max((part.depth for part in inside), default=0)
                value.size = 1 + sum(part.size for part in inside)
                left -= value.size
                if left < 0 or value.depth > _DEEPEST:
                    raise CheckpointCorruptError("its tuples are nested without end")
            if opcode.stack_after:
                stack.append(value)


def _take(stack: list[Any], name: str) -> list[Any]:
    """What an opcode takes off the stack; not the object that it adds to, which stays there."""
    at = len(stack) - _TAKES[name]
    if name in _TO_MARK:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1  # an IndexError where there is none
    elif at < 0:
        raise ValueError(f"{name} at an unexpected place")
    taken = stack[at + (name in _TO_MARK) :]
    del stack[at:]
    return taken


def _check_call(most: int, function: Any, *rest: Any) -> None:
    if not isinstance(function, _Value) or not function.name.endswith(("bytearray", "Tensor", "Storage", "encode")):
        return
    given = [part for value in rest for part in (value.parts if isinstance(value, _Value) else [value])]
    numbers = [abs(part) for part in given if isinstance(part, int)]
    if function.name == "encode":
        if given[1:] not in (["latin1"], ["latin-1"]):
            raise CheckpointCorruptError("it encodes text by something else than latin1")
    elif math.prod(numbers or [0]) > most:
        raise CheckpointCorruptError(f"it makes a {function.name} of {math.prod(numbers)} elements")


def _unfolded(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many objects there are where one that stands in several places counts in each, and how deep they go."""
    if not isinstance(value, _Value):
        return 1, 0
    if id(value) not in known:
        parts = [_unfolded(part, known) for part in value.parts]
        known[id(value)] = 1 + sum(count for count, _ in parts), 1 + max((depth for _, depth in parts), default=0)
    return known[id(value)]
