"""The parser of the command line: Lightning's with readable messages."""

import ast
import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.arguments import imported
from lightning_shard.commands.options import UsageError, actions
from lightning_shard.precision.policy import ALL
from lightning_shard.text import did_you_mean


class ShardArgumentParser(LightningArgumentParser):
    """Lightning's parser, which raises :class:`~lightning_shard.commands.parser.UsageError`."""

    failure: Exception | None = None
    subcommands: Any = None
    instantiators: Sequence[tuple[Callable[..., Any], type, bool]] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the explained message; parsers inside a type check (``exit_on_error=False``) stay as they are."""
        if not self.exit_on_error:
            super().error(message, ex)
        # jsonargparse reports from the parser above the subcommand's, which has the keys.
        parser = getattr(ex, "subcommand_parser", None) or self
        keys = [action.dest for action in actions(parser) if action.dest != "help"]
        raise UsageError(explain(message, keys)) from ex

    def build(self, config: Namespace) -> Namespace:
        """Make the objects of ``config``, and keep in ``self.failure`` the exception of a constructor, which
        jsonargparse reports in other words.
        """
        chosen = self.subcommands.choices.get(config.get("subcommand")) if self.subcommands else None
        given = [*(chosen.instantiators if chosen else []), *self.instantiators, (_construct, object, True)]
        return self.instantiate(config, instantiators=[(self.wrap_instantiator(one), *kinds) for one, *kinds in given])

    def wrap_instantiator(self, instantiator: Callable[..., Any]) -> Callable[..., Any]:
        """``instantiator`` as `build` calls it, with the same signature, which jsonargparse reads."""

        @functools.wraps(instantiator)
        def keep_failure(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                self.failure = error
                raise

        return keep_failure

    # LightningCLI calls its parser by these two names, which jsonargparse has deprecated and 5.0 removes.

    def add_instantiator(
        self, instantiator: Callable[..., Any], class_type: type, subclasses: bool = True, prepend: bool = False
    ) -> None:
        """Make classes of this type by ``instantiator``. The first that fits is taken."""
        added = (instantiator, class_type, subclasses)
        self.instantiators = [added, *self.instantiators] if prepend else [*self.instantiators, added]

    def instantiate_classes(self, cfg: Namespace) -> Namespace:
        """As `build`."""
        return self.build(cfg)

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands


def _construct(class_type: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def explain(message: str, keys: Collection[str]) -> str:
    """A parser's error in one message: the key, the value and what is allowed; ``keys``: all that the parser knows."""
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        options = [word.partition("=")[0] for word in found[1].split() if word.startswith("--")]
        stray = f"{found[1]}: options alone are taken; a configuration is given as --config FILE."
        return "\n".join(_unknown_key(option[2:], keys) for option in options) or stray
    if found := re.match(r"(?:Subcommand '\w+' does not accept option|Option) '([\w.]+)'", message):
        return _unknown_key(found[1], keys)
    if found := re.match(r"the following arguments are required: (.*)|Key \"([\w.]+)\" is required", message):
        names = (found[1] or found[2]).split(", ")
        return "\n".join(f"{name.partition('.')[2] or name}: is required and was not given." for name in names)
    if found := re.match(r"expected \"(?:sub)?command\" to be one of \{(.*?)\}", message):
        return f"no command was given. Commands: {found[1].replace(',', ', ')}."
    if found := re.match(r"Unexpected config: (.*)", message, re.DOTALL):
        return f"{_shown(found[1])} is no mapping of keys such as model, data and trainer."
    return _explain_value(message) if message.startswith("Parser key") else message


_REMOVED = {
    "amp_backend": "precision",
    "amp_level": "precision",
    "auto_lr_find": "lightning.pytorch.callbacks.LearningRateFinder",
    "auto_scale_batch_size": "lightning_shard.callbacks.BatchSizeCallback",
    "auto_select_gpus": "trainer.devices",
    "checkpoint_callback": "trainer.enable_checkpointing",
    "distributed_backend": "trainer.strategy",
    "gpus": "trainer.devices, with trainer.accelerator: gpu",
    "num_processes": "trainer.devices, with trainer.accelerator: cpu",
    "progress_bar_refresh_rate": "refresh_rate of lightning.pytorch.callbacks.TQDMProgressBar",
    "replace_sampler_ddp": "trainer.use_distributed_sampler",
    "resume_from_checkpoint": "ckpt_path, which stands beside trainer",
    "track_grad_norm": "log_grad_norm of the strategy",
    "terminate_on_nan": "nonfinite: raise of the strategy",
    "tpu_cores": "trainer.devices, with trainer.accelerator: tpu",
    "weights_summary": "trainer.enable_model_summary",
}
"""Arguments that the Trainer of Lightning 1 had, to what there is in their place."""


def _unknown_key(key: str, keys: Collection[str]) -> str:
    group, _, name = key.rpartition(".")
    if group == "trainer" and name in _REMOVED:
        return f"{key}: Lightning 2 has no such key. In its place: {_REMOVED[name]}."
    within = ", ".join(sorted(k for k in keys if group and k.startswith(f"{group}.")))
    near = did_you_mean(key, keys) or f" Keys of {group}: {within}." * bool(within)
    return f"{key}: there is no such key.{near}"


def _explain_value(message: str) -> str:
    """The deepest branch of jsonargparse's tree of attempts: that is the form the user wrote the value in."""
    # Classes of modules are for Python; YAML names them.
    branches = _branches(re.sub(r" \| type\[torch\.nn[\w.]+\]", "", message))
    # The others say no more than that the value is not of their type.
    bare = ("Expected a", "Does not validate", "Not a valid subclass", "Subclass types expect", "a ")
    telling = [branch for branch in branches if "Got value:" in branch[1] or not branch[1].startswith(bare)]
    path, text = max(telling or branches, key=lambda branch: len(branch[0]))
    key = _key(path)
    owner = next((scope.name for scope in reversed(path) if scope.kind != "union"), "")
    owned = any(scope.kind == "class" and scope.name == owner for scope in path)

    tried = next((scope for scope in reversed(path) if scope.kind == "union"), None)
    given = "" if tried is None else tried.said.get("Given value", "")
    if beside := _beside_class_path(given):
        return f"{key.removesuffix('.init_args')}: {beside}"
    option = re.match(r"(?:Option|Group '[\w.]+' does not accept option) '([\w.]+)'", text)
    if option and owned:
        arguments = _arguments(owner)
        has = f" It takes: {', '.join(arguments)}."
        if not arguments or (tried is not None and f".{owner.rpartition('.')[2]}'" in tried.said.get("Subtypes", "")):
            has = " A class is given by class_path, and its arguments below init_args."
        return f"{key}.{option[1]}: {owner} has no such argument.{did_you_mean(option[1], arguments)}{has}"
    if owned:
        if text.startswith("No module named"):
            text += f", neither among what is installed nor in this folder, {os.getcwd()}"
        elif missing := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
            text += f".{did_you_mean(missing[2], dir(sys.modules[missing[1]]))}"
        return f"{key.removesuffix('.init_args')}: can't use class_path {owner!r}: {text}"
    if key == "trainer.precision" and given:
        return f"{key}: got {_shown(given)}; strategies of lightning_shard run {ALL}."
    if value := re.match(r"Expected an? (.*?)\.? Got value: (.*)", text):
        return f"{key}: got {_shown(value[2])}; allowed: {_readable(value[1])}"
    if tried is None:
        return f"{key}: {text}"
    if telling:
        return f"{key}: got {_shown(given)}. {text}"
    no_class = re.search(r"Expected a dot import path string: ([\w-]+)$", message, re.MULTILINE)
    if no_class and key == "trainer.strategy" and no_class[1].lower() in StrategyRegistry:
        return (
            f"{key}: {no_class[1]!r} is a name, and a name takes no arguments, but got {_shown(given)}. "
            f"Give class_path and init_args: `lightning-shard strategies {no_class[1]}` prints them."
        )
    types = _readable(tried.said["Subtypes"].removeprefix("[").removesuffix("]"))
    return f"{key}: got {_shown(given)}; allowed: {types}{_how_to_give(types, no_class[1] if no_class else '')}"


def _beside_class_path(given: str) -> str:
    """What is wrong with a class's arguments that do not stand below ``init_args``; "" where none do."""
    try:
        value = ast.literal_eval(given)
    except (SyntaxError, ValueError):
        return ""
    entries = [e for e in (value if isinstance(value, list) else [value]) if isinstance(e, dict)]
    known = ("class_path", "init_args", "dict_kwargs")
    beside = [str(k) for e in entries if "class_path" in e for k in e if k not in known]
    told = f"{', '.join(beside)} stands beside class_path, but a class's arguments stand below init_args."
    return told if beside else ""


def _how_to_give(types: str, word: str) -> str:
    """How a value of these types is written in YAML; ``word``: what was taken for the name of a class."""
    found = {path: imported(path) for path in re.findall(r"[\w.]+\.[A-Z]\w+", types)}
    classes = {path: kind for path, kind in found.items() if isinstance(kind, type)}
    for path, kind in classes.items():
        if dataclasses.is_dataclass(kind):
            return f" (a mapping of {', '.join(_arguments(path))})"
    near = did_you_mean(word, {name for kind in classes.values() for name in _with_subclasses(kind)})
    return f" (a class is given as class_path and init_args).{near}" if classes else ""


def _with_subclasses(base: type) -> list[str]:
    below: list[type] = type.__subclasses__(base)
    return [base.__name__, *(name for kind in below for name in _with_subclasses(kind))]


@dataclasses.dataclass
class _Scope:
    """What a statement of the tree stands under: a key, a class, or a union of types that were tried in turn."""

    indent: int
    kind: str
    name: str
    said: dict[str, str] = dataclasses.field(default_factory=dict)  # Of a union: ``Subtypes``, ``Given value``.


_HEADS = {
    "key": r"Parser key \"([\w.]+)\":\s*(.*)",
    "class": r"Problem with given class_path '(.*?)':\s*(.*)",
    "union": r"()(Does not validate against any.*)",
}
"""Kind of a scope to how it begins: its name, and what is said of it on the same line."""


def _branches(tree: str) -> list[tuple[tuple[_Scope, ...], str]]:
    """Each statement of the tree with its scopes, outermost first."""
    stack: list[_Scope] = []
    found = []
    for line in tree.splitlines():
        text = line.lstrip(" -")
        indent = len(line) - len(text)
        of_union = re.match(r"(Subtypes|Errors|Given value type|Given value): ?(.*)", text)
        # These stand as deep as their union, or one bullet less.
        while stack and text and stack[-1].indent >= indent + (3 if of_union else 0):
            stack.pop()
        if of_union and stack:
            stack[-1].said[of_union[1]] = of_union[2]
            continue
        for kind, pattern in _HEADS.items():
            if head := re.match(pattern, text):
                stack.append(_Scope(indent, kind, head[1]))
                text = head[2]
                break
        if text:
            found.append((tuple(stack), text))
    return found


def _key(path: Sequence[_Scope]) -> str:
    """The key as YAML has it; the fields of a dataclass stand in it without ``init_args``."""
    keys = [scope for scope in path if scope.kind == "key" or not dataclasses.is_dataclass(imported(scope.name))]
    return ".".join("init_args" if scope.kind == "class" else scope.name for scope in keys if scope.kind != "union")


def _arguments(class_path: str) -> list[str]:
    try:
        parameters = inspect.signature(imported(class_path)).parameters
    except (TypeError, ValueError):
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
