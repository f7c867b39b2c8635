"""Attributes of tensors that users read and set in a fit, where an engine keeps what they stand for elsewhere."""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from lightning_shard.cluster.traces import package_of

_Read = Callable[[Any, Any], Any]
_Write = Callable[[Any, Any], bool]

_observers: dict[tuple[type, str], list[tuple[_Read, _Write]]] = {}  # of engines, which may end in any order


@contextmanager
def observed(kind: type, name: str, read: _Read, write: _Write) -> Generator[None, None, None]:
    """Let ``read(tensor, value)`` say what the attribute ``name`` of tensors of ``kind`` is, and ``write(tensor,
    value)`` see what it is set to; it returns true where it has set it itself. Both may ask for the `user`.
    """
    here = _observers.setdefault((kind, name), [])
    if not here:
        own: Any = getattr(Tensor, name)  # the descriptor

        def get(tensor: Tensor) -> Any:
            value = own.__get__(tensor)
            for each, _ in here:
                value = each(tensor, value)
            return value

        def put(tensor: Tensor, value: Any) -> None:
            if not any(each(tensor, value) for _, each in here):
                own.__set__(tensor, value)

        setattr(kind, name, property(get, put, lambda tensor: put(tensor, None)))
    observer = read, write
    here.append(observer)
    try:
        yield
    finally:
        here.remove(observer)
        if not here:
            delattr(kind, name)


def user() -> tuple[FrameType | None, set[str]]:
    """The innermost frame that is not torch's, None where that is an engine's, and the functions inside of it, with
    that around a comprehension for it. Frames of the caller's own file and of this one do not count.
    """
    # A variable with this call's own frame would be a cycle: all callers' tensors would wait for garbage collection.
    frame, through = inspect.currentframe(), set[str]()
    frame = frame and frame.f_back
    files = (__file__, frame and frame.f_code.co_filename)
    while frame is not None and (
        frame.f_code.co_filename in files
        or package_of(frame) == "torch"
        or frame.f_code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
    ):
        through.add(frame.f_code.co_name)
        frame = frame.f_back
    own = frame is None or package_of(frame) in ("lightning_shard", "deepspeed")
    return None if own else frame, through
