"""Constructor arguments in Python, read by their annotations as the command line reads YAML.

Strings and mappings are converted. A value that does not fit is refused at construction.
"""

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from lightning_shard.errors import ConfigurationError
from lightning_shard.text import did_you_mean

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

if TYPE_CHECKING:
    Given: TypeAlias = T | Mapping[str, Any]
else:

    class Given:
        """``Given[T]``: ``T`` or a mapping of its fields for type checkers, else ``T``, which `checked` makes of it."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind


def converted(value: "T | Mapping[str, Any]") -> T:
    """Cast a `Given` argument inside of a constructor that `checked` has converted it for."""
    return cast(T, value)


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def checked(
    whose: str, *, error: type[ConfigurationError] = ConfigurationError, foreign: Callable[[str], str] = lambda name: ""
) -> Callable[[C], C]:
    """Decorate a constructor so that its arguments are converted by its signature. Messages name ``whose`` they are.

    ``foreign`` gives a hint for another tool's argument, as a sentence with a blank before it.
    """

    def decorate(constructor: C) -> C:
        @functools.wraps(constructor)
        def read_and_construct(self: Any, *args: Any, **given: Any) -> None:
            signature = _signature(constructor)
            known = [name for name in signature.parameters if name != "self"]
            for name in given:
                if name not in known:
                    hint = foreign(name) or did_you_mean(name, known) + f" It takes: {', '.join(known)}."
                    raise error(f"{whose} has no argument {name!r}.{hint}")
            bound = signature.bind(self, *args, **given)
            for name, value in bound.arguments.items():
                if name != "self":
                    bound.arguments[name] = read(signature.parameters[name].annotation, value, name, whose, error)
            constructor(*bound.args, **bound.kwargs)

        return read_and_construct  # type: ignore[return-value]

    return decorate


def checked_fields(whose: str, *, error: type[ConfigurationError] = ConfigurationError) -> Callable[[type[T]], type[T]]:
    """As `checked`, for a dataclass that is the value of the argument ``whose``."""

    def decorate(cls: type[T]) -> type[T]:
        setattr(cls, "__init__", checked(whose, error=error)(cls.__init__))  # noqa: B010
        return cls

    return decorate


@functools.cache
def _signature(constructor: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(constructor, eval_str=True)


def read(
    kind: Any, value: Any, name: str, whose: str = "", error: type[ConfigurationError] = ConfigurationError
) -> Any:
    """Convert ``value`` to the annotation ``kind``, or raise ``error``."""
    kinds = _members(kind)
    with suppress(_Mismatch):
        return _converted(kinds, value)
    path = f"{whose}.{name}" if whose.islower() else name
    *words, last = [word for kind in kinds for word in _words(kind)]
    rule = f"{', '.join(words)} or {last}" if words else last
    raise error(f"{path} is {_shown(value)}, but must be {rule}.{_fix(kinds, value, name)}")


class _Mismatch(Exception):
    """The value does not fit one member of a union."""


def _members(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, UnionType):
        return tuple(m for member in get_args(kind) for m in _members(member))
    return (kind,)


def _converted(kinds: Sequence[Any], value: Any) -> Any:
    # Members are tried in order, first those that need no conversion.
    for convert in (False, True):
        for kind in kinds:
            with suppress(_Mismatch):
                return _convert(kind, value, convert)
    raise _Mismatch


def _convert(kind: Any, value: Any, convert: bool) -> Any:
    """Convert ``value`` to one member of a union. ``convert``: allow strings, mappings and other numbers."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if kind in (Any, inspect.Parameter.empty):
        return value
    if kind in (None, NoneType):
        return _fitting(value is None, value)
    if origin is Literal:
        text = _word(value)
        found = [a for a in arguments if (a == value and not isinstance(value, bool)) or (convert and str(a) == text)]
        return _fitting(bool(found), *found[:1])
    if kind in (int, float):
        return _number(kind, value, convert)
    if kind is str:
        path = convert and isinstance(value, os.PathLike)
        return os.fspath(value) if path else _fitting(isinstance(value, str), value)
    if origin in (list, tuple):
        fits = isinstance(value, list | tuple | set if convert else origin)
        return origin(_converted(_members(arguments[0]), item) for item in _fitting(fits, value))
    if is_dataclass(kind) and convert and isinstance(value, Mapping):
        return kind(**value)  # type: ignore[operator]
    if origin is Callable or kind is Callable:
        found_function = imported(value) if convert and isinstance(value, str) else value
        return _fitting(callable(found_function), found_function)
    return _fitting(isinstance(value, Mapping if origin is dict else origin), value)


def _word(value: Any) -> Any:
    """``"bf16"`` for ``torch.bfloat16``. Other values stay."""
    found = re.fullmatch(r"torch\.(b?)float(\d+)", str(value))
    return f"{found[1]}f{'' if found[1] else 'p'}{found[2]}" if found else value


def _fitting(fits: bool, *value: Any) -> Any:
    if not fits:
        raise _Mismatch
    return value[0]


def _number(kind: type[int] | type[float], value: Any, convert: bool) -> Any:
    if isinstance(value, str) and convert:
        try:
            return kind(value)
        except ValueError:
            raise _Mismatch from None
    number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return _fitting(number, value if isinstance(value, kind) or not number else kind(value))


def imported(path: str) -> Any:
    """Object at this import path, or None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _words(kind: Any) -> list[str]:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return [repr(argument) for argument in get_args(kind)]
    if is_dataclass(kind):
        return [kind.__name__, f"a mapping ({', '.join(f.name for f in fields(kind))})"]  # type: ignore[union-attr]
    if origin in (list, tuple):
        items = {str: "names", type: "classes", int: "integers"}
        members = [get_origin(member) or member for member in _members(get_args(kind)[0])]
        words = [items.get(m) or f"mappings ({', '.join(f.name for f in fields(m))})" for m in members]
        return [f"a list of {' or '.join(words)}"]
    return [_NAMED.get(origin, getattr(origin, "__name__", str(origin)))]


_NAMED: dict[Any, str] = {
    bool: "True or False", int: "an integer", float: "a number", str: "a string", type: "a class",
    dict: "a mapping", NoneType: "None", None: "None", Callable: "a function or its import path",
}  # fmt: skip


def _fix(kinds: Sequence[Any], value: Any, name: str) -> str:
    """Suggestion of a valid value, if it is plain."""
    if bool in kinds and str(value).lower() in _SWITCHES:
        return f" Write {name}={_SWITCHES[str(value).lower()]}."
    if tuple(kinds) == (bool,):
        return f" Write {name}=True to turn it on."
    words = [a for kind in kinds if get_origin(kind) is Literal for a in get_args(kind) if isinstance(a, str)]
    groups = [fields(kind) for kind in kinds if is_dataclass(kind)]
    if value is True and (words or groups):
        shown = words[0] if words else {field.name: field.default for field in groups[0][:1]}
        return f" Write {name}={shown!r}."
    if isinstance(value, list | tuple) and [group for group in groups if len(group) == len(value)]:
        return f" Write {name}={dict(zip((field.name for field in groups[0]), value, strict=False))}."
    text = _word(value)
    near = did_you_mean(text, words) if isinstance(text, str) else ""
    takes_names = any(str in _members(get_args(kind)[0]) for kind in kinds if get_origin(kind) is list)
    return f" Write {name}={[text]}." if isinstance(text, str) and takes_names and not near else near
