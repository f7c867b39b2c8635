"""Which stored tensors, and kinds of optimizers, go to which live ones, by name and tied names; what does not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.checkpoint.optimizer_state import Group, kind_of
from lightning_shard.checkpoint.state_dict import StateDict
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import Names
from lightning_shard.text import listed

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load left alone, which is nothing after a strict one, and what it replaced."""

    missing: tuple[str, ...] = ()  # Asked for, not in the checkpoint: these tensors kept their values.
    unexpected: tuple[str, ...] = ()  # In the checkpoint, not asked for.
    averages: bool = False  # Whether averages of weights were asked for, and read.
    # Hyperparameters of optimizers that had another value here, with both, of which the first wins.
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Match:
    sources: dict[str, str] = field(default_factory=dict)  # Name of a live tensor to the name that it is stored under.
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # Missing too, and not asked for.
    unexpected: list[str] = field(default_factory=list)
    doubles: list[tuple[str, str]] = field(default_factory=list)  # Of one live tensor; the second is taken.
    reshaped: list[str] = field(default_factory=list)  # Names with both shapes.
    problems: list[str] = field(default_factory=list)  # What else does not fit, in sentences.

    def judge(self, path: object, strict: bool, *, where: str = "the checkpoint", hint: str = "") -> LoadReport:
        """What to report; CheckpointMismatchError of a bad match. ``hint``: what may help beside ``strict=False``."""
        if not self.sources and (self.missing or self.unexpected):
            raise CheckpointMismatchError(
                f"nothing in {path} matches the model by name. It asks for {listed(sorted(self.missing), most=20)}; in "
                f"{where} there is {listed(sorted(self.unexpected), most=20)}. {hint}".rstrip()
            )
        if self.reshaped or self.problems or (strict and (self.missing or self.unexpected)):
            kinds = {f"missing in {where}": self.missing, f"unexpected in {where}": self.unexpected}
            lines = [f"  {kind} ({len(keys)}): {listed(sorted(keys), most=20)}" for kind, keys in kinds.items() if keys]
            if self.reshaped:
                lines.append(f"  of another shape ({len(self.reshaped)}):")
                lines += [f"    {each}" for each in sorted(self.reshaped)[:10]]
                lines += [f"    and {len(self.reshaped) - 10} more"] * (len(self.reshaped) > 10)
            lines += [f"  {problem}" for problem in self.problems[:20]]
            if self.reshaped and not self.problems:
                lines += ["  Give these the shapes that were saved, or others to what is loaded in on_load_checkpoint."]
            elif not self.problems:
                lines += [f"  {hint}strict=False (in a run strict_loading = False of the module) loads what matches."]
            raise CheckpointMismatchError("\n".join([f"{path} does not fit:", *lines]))
        return LoadReport(missing=(*self.missing, *self.kept), unexpected=tuple(self.unexpected))


def match(live: Shapes, aliases: Mapping[str, str], stored: Shapes, homes: Mapping[str, str] | None = None) -> Match:
    """Find each live tensor among the stored ones; both are name to full shape, each tensor once. ``aliases``: further
    name of a tied live tensor to its name; ``homes``: each name looked for, to the one in ``stored``.
    """
    homes = {name: name for name in stored} if homes is None else homes
    further, found = further_names(aliases), Match()
    for name, shape in live.items():
        source = next((homes[n] for n in (name, *further.get(name, ())) if n in homes), None)
        if source is None:
            found.missing.append(name)
            continue
        found.sources[name] = source
        if stored[source] != shape:
            found.reshaped.append(f"{name} {stored[source]} there, {shape} here")
    for alias, name in aliases.items():
        source = found.sources.get(name)
        if source is not None and homes.get(alias, source) != source:
            found.doubles.append((homes[alias], source))
    known = {homes[name] for name in (*live, *aliases) if name in homes}
    found.unexpected.extend(name for name in dict.fromkeys(homes.values()) if name not in known)
    return found


Wanted = Mapping[str, Mapping[str, LiveTensor]]


def match_keys(found: Manifest, state: StateDict, names: Names, wanted: Wanted, *, kept: set[str] | None) -> Match:
    """Match ``wanted`` by prefix and FQN; ``kept``: what may be missing, with which digests are compared; None: all."""
    stored = {**{key: entry.shape for key, entry in found.tensors.items()}, **state.shapes}
    homes, aliases = {}, {}
    for prefix, known in wanted.items():
        aliases.update({prefix + alias: prefix + fqn for alias, fqn in names.aliases.items() if fqn in known})
        for name, key in state.keys.items():
            home = key if key in state.values else prefix + key.removeprefix(layout.MODEL_PREFIX)
            if home in stored:
                homes[prefix + name] = home
    live = by_key(wanted)
    for key, tensor in live.items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise CheckpointError(f"{key} is on the meta device: materialise the model before loading into it")
    matched = match({key: tuple(tensor.shape) for key, tensor in live.items()}, aliases, stored, homes)
    own = {names.aliases.get(name, name) for name in state.kept}
    for fqn in own:
        if names.tensors[fqn].shape != (full := tuple(wanted[layout.MODEL_PREFIX][fqn].shape)):
            matched.problems.append(
                f"{fqn} was taken from the module's own state_dict(), which has no values of it under this engine: it "
                f"has shape {full}. Compare with shapes that do not come from there, or delete the names"
            )
    if kept is not None:
        digested = {
            prefix + fqn for fqn in found.facts.frozen for prefix in (layout.MODEL_PREFIX, layout.AVERAGE_PREFIX)
        }
        left = {layout.MODEL_PREFIX + fqn for fqn in own | kept}
        matched.kept.extend(key for key in matched.missing if key in left - digested)
        matched.missing[:] = [key for key in matched.missing if key not in left | digested]
    matched.unexpected[:] = [key for key in matched.unexpected if key.startswith(layout.MODEL_PREFIX)]
    return matched


def by_key(wanted: Mapping[str, Mapping[str, LiveTensor]]) -> dict[str, LiveTensor]:
    return {prefix + fqn: tensor for prefix, tensors in wanted.items() for fqn, tensor in tensors.items()}


def further_names(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Name of each tied tensor to its other names; ``aliases``: those to it."""
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    return further


_RULES = {"betas", "momentum", "alpha", "rho", "lambd", "etas", "step_sizes"}
"""Hyperparameters by which kinds of optimizers differ."""


def other_kind(optimizer: Optimizer, live: Sequence[Group], described: Mapping[str, Any]) -> str | None:
    """Why the state is that of another kind of optimizer than the live one; None if it is not, as far as is known."""
    saved, here = described["class"].rpartition(".")[2][:100], kind_of(optimizer)
    if saved == "unknown":  # of another library's checkpoint
        groups = (described["groups"], [group.settings for group in live])
        then, now = (sorted({rule for group in part for rule in _RULES & group.keys()}) for part in groups)
        if then == now or not described["groups"]:
            return None
        saved = f"one with {', '.join(then) or 'neither betas nor momentum'}"
    else:
        mro = [cls.__name__ for cls in type(optimizer).__mro__]
        # A class of the user's may stand for the one of torch that it is made from.
        torchs = next(n for n, cls in enumerate(type(optimizer).__mro__) if cls.__module__.startswith("torch.optim"))
        if saved in {here, *mro[: torchs + 1]}:
            return None
    return (
        f"was {saved} and is {here} here: build the optimizer that was saved, or begin anew from the weights alone "
        "(load_from_checkpoint)"
    )
