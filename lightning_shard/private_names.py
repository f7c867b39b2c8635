"""That the private names of other libraries which a module uses are still there, asked when it is imported."""

import dis
import inspect
from types import ModuleType
from typing import Any


def require(owner: type | ModuleType, names: str, *, tested: str) -> None:
    """ImportError, which names ``tested`` versions, where ``owner``, a class or module, lacks one of ``names``
    (separated by blanks); of a class also what is set on ``self`` in a method.
    """
    missing = [name for name in names.split() if not hasattr(owner, name)]
    if missing and isinstance(owner, type):
        missing = [name for name in missing if name not in _set_on_instances(owner)]
    if missing:
        raise ImportError(
            f"{owner.__name__} has no {', '.join(missing)}, which lightning_shard uses. Install a version of the "
            f"library that it was tested on: {tested}."
        )


def _set_on_instances(owner: type) -> set[str]:
    found: set[str] = set()
    for cls in owner.__mro__:
        found.update(vars(cls).get("__annotations__", ()))
        for value in vars(cls).values():
            code: Any = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            if code is not None:
                found.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    return found
