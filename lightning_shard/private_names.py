"""Check on import that the private names of other libraries exist and can be assigned."""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightning_shard.versions import tested


def require(owner: type | ModuleType, names: str = "", *, assigned: str = "") -> None:
    """Raise an ImportError, which names the tested versions, if ``owner`` lacks one of ``names`` or ``assigned``.

    ``owner`` is a class, or a module with its own classes. Attributes that a class' methods set on any object count.
    Names are separated by blanks. Each of ``assigned`` must also be settable on an instance of a class.
    """
    if missing := [name for name in (*names.split(), *assigned.split()) if not hasattr(owner, name)]:
        inside = [owner] if isinstance(owner, type) else [c for c in vars(owner).values() if isinstance(c, type)]
        for cls in (cls for cls in inside if cls is owner or cls.__module__ == owner.__name__):
            found = {*dir(cls), *_set_on_instances(cls, missing)}
            missing = [name for name in missing if name not in found]
    if missing:
        raise _untested(owner, f"has no {', '.join(missing)}, which lightning_shard uses")
    if isinstance(owner, type) and (fixed := [name for name in assigned.split() if not _can_be_set(owner, name)]):
        raise _untested(owner, f"lets nobody assign {', '.join(fixed)}, as lightning_shard does")


def _untested(owner: type | ModuleType, problem: str) -> ImportError:
    library = (owner.__module__ if isinstance(owner, type) else owner.__name__).partition(".")[0]
    library = "python" if library in sys.stdlib_module_names else library
    return ImportError(
        f"{owner.__name__} {problem}. Install a version that it was tested on: {library} {tested(library)}."
    )


def _can_be_set(owner: type, name: str) -> bool:
    held = inspect.getattr_static(owner, name, None)
    if isinstance(held, property):
        return held.fset is not None
    frozen = getattr(getattr(owner, "__dataclass_params__", None), "frozen", False)
    # An instance without a dict takes the names of its slots alone.
    return not frozen and (owner.__dictoffset__ != 0 or inspect.isdatadescriptor(held))


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace the method ``owner.name`` by ``call``, which gets the earlier one as its first argument."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def _set_on_instances(owner: type, wanted: Sequence[str]) -> set[str]:
    """Names set on objects by methods that mention a wanted one: disassembling all would take longer than imports."""
    found: set[str] = set()
    for cls in owner.__mro__:
        found.update(vars(cls).get("__annotations__", ()))
        for value in vars(cls).values():
            for code in _codes(value):
                if not set(wanted).isdisjoint(code.co_names):
                    found.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return found


def _codes(function: Any, seen: set[FunctionType] | None = None) -> Iterator[CodeType]:
    """The code of a function and of functions in its closure, such as decorated ones without ``functools.wraps``."""
    seen = set() if seen is None else seen
    if isinstance(function, FunctionType) and function not in seen:
        seen.add(function)  # a function's closure may hold itself
        yield function.__code__
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield from _codes(cell.cell_contents, seen)
