"""That the private names of other libraries which a module uses are still there, asked when it is imported."""

import dis
import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

TESTED = {
    "torch": "2.11 to 2.13",
    "lightning": "2.6.4 to 2.6.6",
    "deepspeed": "0.19",
    "torchmetrics": "1.5 to 1.9",
    "argparse": "of Python 3.10 to 3.13",
}
"""The versions whose private names this package knows, by the library that ``import`` names."""


def require(owner: type | ModuleType, names: str) -> None:
    """ImportError, which names the versions of `TESTED`, where ``owner``, a class, or a module with the classes that it
    defines, lacks one of ``names`` (separated by blanks); of a class also what is set on ``self`` in a method.
    """
    if missing := [name for name in names.split() if not hasattr(owner, name)]:
        inside = [owner] if isinstance(owner, type) else [c for c in vars(owner).values() if isinstance(c, type)]
        for cls in (cls for cls in inside if cls is owner or cls.__module__ == owner.__name__):
            found = {*dir(cls), *_set_on_instances(cls)}
            missing = [name for name in missing if name not in found]
    if missing:
        library = (owner.__module__ if isinstance(owner, type) else owner.__name__).partition(".")[0]
        raise ImportError(
            f"{owner.__name__} has no {', '.join(missing)}, which lightning_shard uses. Install a version that it was "
            f"tested on: {library} {TESTED[library]}."
        )


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let ``owner.name(...)`` be ``call(what it was, ...)``."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def _set_on_instances(owner: type) -> set[str]:
    found: set[str] = set()
    for cls in owner.__mro__:
        found.update(vars(cls).get("__annotations__", ()))
        for value in vars(cls).values():
            code: Any = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if code is not None:
                found.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return found
