"""What a user did wrong on the command line, in one readable message.

jsonargparse reports a bad value as the tree of all the types that it tried. :func:`explain` finds the branch that
the user meant and says the key, the value and what is allowed; :func:`is_mistake` tells a setting that can't work
from a bug, which keeps its traceback; :func:`global_rank` says which rank this process is, since one is to speak.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Collection, Mapping
from types import FrameType, TracebackType

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_shard.errors import ShardError

# Packages whose frames are not the user's code.
_LIBRARIES = {
    "deepspeed",
    "jsonargparse",
    "lightning",
    "lightning_shard",
    "lightning_utilities",
    "torch",
    "torchmetrics",
    "transformers",
    *sys.stdlib_module_names,
} - {"__main__"}


class UsageError(Exception):
    """Arguments or a configuration file that can't be parsed; the message is complete."""


def global_rank(environ: Mapping[str, str]) -> int:
    """Rank that the launcher gave to this process; 0 where none did.

    ``RANK`` is torchrun's, ``LOCAL_RANK`` without it that of Lightning's own launcher, whose children may stand
    inside a SLURM job step of one task (so it comes before SLURM's).
    """
    if "RANK" in environ:
        return int(environ["RANK"])
    if "LOCAL_RANK" in environ:
        local_world = max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        return int(environ.get("NODE_RANK", "0")) * local_world + int(environ["LOCAL_RANK"])
    return int(environ.get("SLURM_PROCID", "0"))


def is_mistake(error: BaseException) -> bool:
    """Whether the message alone says what to change, so that a traceback would only be in the way.

    An error of this package, Lightning's ``MisconfigurationException``, and what Lightning itself refuses without
    the user's code having been entered (an unknown accelerator, no checkpoint at a path).
    """
    if isinstance(error, UsageError | ShardError | MisconfigurationException):
        return True
    if not isinstance(error, ValueError | FileNotFoundError | ModuleNotFoundError):
        return False
    frames = _frames(error.__traceback__)
    innermost = _package(frames[-1]) if frames else ""
    return innermost == "lightning" and user_frame(error) is None


def user_frame(error: BaseException) -> str | None:
    """``file:line, in function`` of the innermost frame in the user's own code, or None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _package(frame) not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return None


def _frames(trace: TracebackType | None) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(trace)]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def explain(message: str, keys: Collection[str]) -> str:
    """A parser's error in one message: the key, the value and what is allowed.

    Args:
        message: what jsonargparse says.
        keys: every key that the parser knows, such as ``trainer.max_epochs``.
    """
    unknown = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unknown:
        options = [word.partition("=")[0] for word in unknown[1].split() if word.startswith("--")]
        return "\n".join(_unknown_key(option[2:], keys) for option in options) or message
    unknown = re.match(r"(?:Subcommand '\w+' does not accept option|Option) '([\w.]+)'", message)
    if unknown:
        return _unknown_key(unknown[1], keys)
    missing = re.match(r"the following arguments are required: (.*)|Key \"([\w.]+)\" is required", message)
    if missing:
        names = (missing[1] or missing[2]).split(", ")
        return "\n".join(f"{name.partition('.')[2] or name}: is required and was not given." for name in names)
    choices = re.match(r"expected \"subcommand\" to be one of \{(.*?)\}", message)
    if choices:
        return f"no command was given. Commands: {choices[1].replace(',', ', ')}."
    if message.startswith("Parser key"):
        return _explain_value(message)
    return message


def _unknown_key(key: str, keys: Collection[str]) -> str:
    near = nearest(key, keys)
    if not near:
        group = key.rpartition(".")[0]
        within = sorted(k for k in keys if k.startswith(f"{group}.")) if group else []
        near = f" Keys of {group}: {', '.join(within)}." if within else ""
    return f"{key}: there is no such key.{near}"


def nearest(word: str, choices: Collection[str]) -> str:
    """``" Did you mean ...?"`` with at most three of the choices, or ``""``."""
    near = difflib.get_close_matches(word, choices, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _explain_value(message: str) -> str:
    """The deepest branch of jsonargparse's tree of attempts: that is the form the user wrote the value in."""
    tree, _, given = message.partition("Given value type:")
    given = given.partition("Given value:")[2].strip()
    branches = _branches(tree)
    depth = max(len(path) for path, _ in branches)
    path, text = next(branch for branch in branches if len(branch[0]) == depth)
    key = ".".join("init_args" if kind == "class" else name for kind, name in path)
    owner = path[-1][1] if path[-1][0] == "class" else None

    option = re.match(r"(?:Option|Group '[\w.]+' does not accept option) '([\w.]+)'", text)
    if option and owner:
        arguments = _arguments(owner)
        has = f" It takes: {', '.join(arguments)}." if arguments else ""
        return f"{key}.{option[1]}: {owner} has no such argument.{nearest(option[1], arguments)}{has}"
    if owner:
        return f"{key.removesuffix('.init_args')}: can't use class_path {owner!r}: {text}"
    value = re.match(r"(?P<rule>.*?)\.? Got value: (?P<value>.*)", text, re.DOTALL)
    if value:
        rule = value["rule"].removeprefix("Expected a ").removeprefix("Expected an ")
        return f"{key}: got {_shown(value['value'])}; allowed: {_readable(rule)}"
    subtypes = re.search(r"Subtypes: \[(.*)\]\n", tree)
    if subtypes:
        reason = "".join(
            f"\n{note}" for _, note in branches if note.startswith(("Import path", "Expected a dot import"))
        )
        return f"{key}: got {_shown(given)}; allowed: {_readable(subtypes[1])}{_how_to_give(subtypes[1])}{reason}"
    return f"{key}: {text}" + (f"; got {_shown(given)}" if given else "")


def _how_to_give(types: str) -> str:
    return " (a class is given as class_path and init_args)" if re.search(r"\.\w*\.[A-Z]\w+", types) else ""


_Path = tuple[tuple[str, str], ...]


def _branches(tree: str) -> list[tuple[_Path, str]]:
    """Each statement of the tree with the keys and classes that it stands under."""
    stack: list[tuple[int, str, str]] = []
    found: list[tuple[_Path, str]] = []
    for line in tree.splitlines():
        text = line.lstrip(" -")
        indent = len(line) - len(text)
        if not text:
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        scope = re.match(r"Parser key \"([\w.]+)\":\s*(.*)", text)
        klass = re.match(r"Problem with given class_path '(.*?)':\s*(.*)", text)
        if scope:
            stack.append((indent, "key", scope[1]))
            text = scope[2]
        elif klass:
            stack.append((indent, "class", klass[1]))
            text = klass[2]
        if text:
            found.append((tuple((kind, name) for _, kind, name in stack), text))
    return found


def _arguments(class_path: str) -> list[str]:
    """Names of the constructor arguments of a class that can be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return [p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _shown(value: str) -> str:
    nested = re.fullmatch(r"NestedArg\(key='(.*)', val=(.*)\)", value)
    return f"{nested[1]}={nested[2]}" if nested else repr(value) if " " in value or not value else value


def _readable(types: str) -> str:
    """``<class 'int'>, typing.Literal['auto'], <class 'NoneType'>`` as ``int, 'auto', null``."""
    types = re.sub(r"<class '([\w.]+)'>", r"\1", types)
    types = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1", types)
    types = re.sub(r"\bNoneType\b|\bNone\b", "null", types)
    return types.replace("typing.", "").replace("collections.abc.", "")
