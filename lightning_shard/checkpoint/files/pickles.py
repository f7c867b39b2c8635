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

# By opcode: the bytes after a leaf, the bytes of the length of one, and how many objects others take.
_LEAF = dict(zip(b"JKMNG)\x88\x89", (4, 1, 2, 0, 8, 0, 0, 0), strict=True))
_COUNTED = dict(zip(b"TUX\x8c\x8dBC\x8e\x96\x8a\x8b", b"\4\1\4\1\x08\4\1\x08\x08\1\4", strict=True))
_TUPLE = {0x85: 1, 0x86: 2, 0x87: 3}
_PUT, _GET = {ord("q"): 1, ord("r"): 4}, {ord("h"): 1, ord("j"): 4}
_SKIPPED = {0x80: 1, 0x95: 8}
_CALL = {ord("R"): 2, 0x81: 2, 0x92: 3}
_TO_MARK = set(b"teu1\x90\x91ldo")


class _Value:
    """An object with others in it, or a function. A leaf is its place in the pickle."""

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
    left, at, push = 1_000_000 + 4 * len(data), 0, stack.append
    while True:
        code, start, at = data[at], at, at + 1
        if code == 0x94:
            memo[len(memo)] = stack[-1]
        elif code in _LEAF:
            at += _LEAF[code]
            push(start)
        elif code in _GET:
            at += _GET[code]
            push(memo[int.from_bytes(data[start + 1 : at], "little")])
        elif code in _PUT:
            at += _PUT[code]
            if (number := int.from_bytes(data[start + 1 : at], "little")) > len(data):
                raise CheckpointCorruptError(f"it numbers an object {number} in {len(data)} bytes")
            memo[number] = stack[-1]
        elif code in _COUNTED:
            at += _COUNTED[code]
            at += int.from_bytes(data[start + 1 : at], "little")
            push(start)
        elif code == ord("("):
            push(_MARK)
        elif code in _SKIPPED:
            at += _SKIPPED[code]
        elif code in b"SIFLV":
            at = data.index(b"\n", at) + 1
            push(start)
        elif code == ord("c"):
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            push(_Value([], data[start + 1 : at].split(b"\n")[1].decode(errors="replace")))
        elif code in b"]}\x8f":
            push(_Value([]))
        elif code == ord("."):
            count, depth = _unfolded(stack[-1], {})
            if count > left or depth > _DEEPEST:
                raise CheckpointCorruptError("its parts stand in each other without end")
            return
        elif code in b"PQ" and (code == ord("P") or not stack):
            return  # every reader refuses it there
        else:
            taken = _take(stack, code)
            if code in _TUPLE or code in b"t\x91":
                value = _Value(taken)
                inside = [part for part in taken if isinstance(part, _Value)]
                value.depth = 1 + max((part.depth for part in inside), default=0)
                value.size = 1 + sum(part.size for part in inside)
                left -= value.size
                if left < 0 or value.depth > _DEEPEST:
                    raise CheckpointCorruptError("its tuples are nested without end")
                push(value)
            elif code in b"aesub\x90":
                if not stack[-1].name:
                    stack[-1].parts.extend(taken)
            elif code in _CALL or code == ord("o"):
                _check_call(data, *taken)
                push(_Value(taken))
            elif code == 0x93:
                push(_Value([], _leaf(data, taken[-1])))
            elif code not in b"01":
                push(_Value(taken))


def _take(stack: list[Any], code: int) -> list[Any]:
    """What an opcode takes off the stack; not the object that it adds to, which stays there."""
    if code in _TO_MARK:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1  # an IndexError where there is none
        taken = stack[at + 1 :]
        del stack[at:]
        return taken
    count = _TUPLE.get(code) or _CALL.get(code) or {ord("s"): 2, 0x93: 2}.get(code, 1)
    if len(stack) < count or not (code in b"ab0sQ\x93" or code in _TUPLE or code in _CALL):
        raise ValueError(f"opcode {code:#x} at an unexpected place")
    taken = stack[-count:]
    del stack[-count:]
    return taken


def _leaf(data: bytes, at: Any) -> Any:
    return next(iter(pickletools.genops(data[at:])))[1] if isinstance(at, int) else None


def _check_call(data: bytes, function: Any, *rest: Any) -> None:
    if not isinstance(function, _Value) or not function.name.endswith(("bytearray", "Tensor", "Storage", "encode")):
        return
    given = [_leaf(data, part) for value in rest for part in (value.parts if isinstance(value, _Value) else [value])]
    numbers = [abs(part) for part in given if isinstance(part, int)]
    if function.name == "encode":
        if given[1:] not in (["latin1"], ["latin-1"]):
            raise CheckpointCorruptError("it encodes text by something else than latin1")
    elif math.prod(numbers or [0]) > len(data):
        raise CheckpointCorruptError(f"it makes a {function.name} of {math.prod(numbers)} elements")


def _unfolded(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many objects there are where one that stands in several places counts in each, and how deep they go."""
    if not isinstance(value, _Value):
        return 1, 0
    if id(value) not in known:
        parts = [_unfolded(part, known) for part in value.parts]
        known[id(value)] = 1 + sum(count for count, _ in parts), 1 + max((depth for _, depth in parts), default=0)
    return known[id(value)]
