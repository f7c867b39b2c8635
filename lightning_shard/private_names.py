"""Ask on import whether the undocumented names of other libraries that a module uses are there and can be assigned."""

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
    """ImportError, which names the tested versions, where ``owner``, a class, or a module with the classes that it
    defines, lacks one of ``names`` and ``assigned`` (separated by blanks), or where one of ``assigned`` can't be set on
    an instance of a class. Of a class all names count that its methods set on ``self`` or on other objects.
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
    # An instance without a dict takes what its slots have.
    return not frozen and (owner.__dictoffset__ != 0 or inspect.isdatadescriptor(held))


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let ``owner.name(...)`` be ``call(what it was, ...)``."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def _set_on_instances(owner: type, wanted: Sequence[str]) -> set[str]:
    """Those that are ``wanted``, maybe with others: to disassemble every method takes longer than all imports."""
    found: set[str] = set()
    for cls in owner.__mro__:
        found.update(vars(cls).get("__annotations__", ()))
        for value in vars(cls).values():
            for code in _codes(value):
                if not set(wanted).isdisjoint(code.co_names):
                    found.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return found


def _codes(function: Any, seen: set[FunctionType] | None = None) -> Iterator[CodeType]:
    """The code of a function and of those that it wraps, also without ``functools.wraps``."""
    seen = set() if seen is None else seen
    if isinstance(function, FunctionType) and function not in seen:
        seen.add(function)  # a function's closure may hold itself
        yield function.__code__
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield from _codes(cell.cell_contents, seen)
