"""A DataLoader that stands for another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class DelegatingLoader(DataLoader[Any]):
    """Is a DataLoader for ``isinstance`` and has every attribute of `inner`; iterating is the subclass's.

    Frameworks read samplers, worker counts and dataset from a loader, set its ``worker_init_fn`` and shut its
    ``_iterator`` down: all of that reaches `inner`. DataLoader's own constructor is not called.
    """

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        # Reached for what neither this object nor the class has. Before __init__ (copy, pickle) there is no inner.
        if name == "_inner" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    _own: frozenset[str] = frozenset()  # Names of the attributes that are the wrapper's; all others are set on `inner`.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)
