"""Settings in plain values, that ranks, manifests and later runs compare."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any


def plain_settings(*options: Any, **more: Any) -> dict[str, Any]:
    """The fields of option dataclasses, and further settings, by name, in `plain` values."""
    found = {f.name: plain(getattr(o, f.name)) for o in options for f in fields(o)}
    return {**found, **{name: plain(value) for name, value in more.items()}}


def plain(value: Any) -> Any:
    """``value`` in JSON's types, equal for equal values on every rank: functions by import path, objects by class."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=json.dumps)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
