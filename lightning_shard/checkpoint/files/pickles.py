"""A look at a pickle before it is opened: it is to take no more time and memory than its bytes give reason to.

Unpicklers that refuse functions still follow a few bytes into exponential work (a tuple of a tuple twice, forty deep,
as the key of a dictionary), the end of the stack (tuples a million deep) and gigabytes (``bytearray(2**33)``, a place
in the memo beyond all objects).
"""

import math
import pickletools
from typing import Any

from lightning_shard.errors import CheckpointCorruptError

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
    """Raise CheckpointCorruptError where opening ``data`` would take memory or time without end.

    What it calls is not looked at, but for the few functions that every reader of tensors allows. Other errors
    (IndexError, KeyError, ValueError, RecursionError) say that it is no pickle, or one of another kind than is read.
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
