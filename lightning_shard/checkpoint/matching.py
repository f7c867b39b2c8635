"""Matching stored tensors with live ones by name, with all mismatches in one report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.manifest import Manifest
from lightning_shard.checkpoint.state_dict import StateDict
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import Names
from lightning_shard.text import listed

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Tensors that a load left alone (none after a strict one) and hyperparameters that it replaced."""

    missing: tuple[str, ...] = ()  # asked for but not in the checkpoint: these tensors kept their values
    unexpected: tuple[str, ...] = ()  # in the checkpoint but not asked for
    averages: bool = False  # True if averages of weights were asked for and read
    overridden: tuple[str, ...] = ()  # optimizers' hyperparameters that differed, with both values, the winner first


@dataclass(frozen=True, kw_only=True)
class Match:
    sources: dict[str, str] = field(default_factory=dict)  # name of a live tensor to its stored name
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # missing too, but not asked for
    unexpected: list[str] = field(default_factory=list)
    doubles: list[tuple[str, str]] = field(default_factory=list)  # stored names of one live tensor: ignored, taken
    reshaped: dict[str, str] = field(default_factory=dict)  # name of a live tensor to both shapes in words
    problems: list[str] = field(default_factory=list)  # other mismatches, in sentences

    def report_or_raise(
        self, path: object, strict: bool, *, where: str = "the checkpoint", hint: str = ""
    ) -> LoadReport:
        """CheckpointMismatchError of a bad match. ``hint``: a remedy to name before ``strict=False``."""
        if not self.sources and (self.missing or self.unexpected):
            raise CheckpointMismatchError(
                f"nothing in {path} matches the model by name. It asks for {listed(sorted(self.missing), most=20)}; in "
                f"{where} there is {listed(sorted(self.unexpected), most=20)}. {hint}".rstrip()
            )
        if self.reshaped or self.problems or (strict and (self.missing or self.unexpected)):
            shapes = [f"{name} {both}" for name, both in self.reshaped.items()]
            kinds = (f"missing in {where}", self.missing), (f"unexpected in {where}", self.unexpected)
            lines = [
                f"{kind} ({len(keys)}): {listed(sorted(keys), most=20)}"
                for kind, keys in (*kinds, ("of another shape", shapes))
                if keys
            ]
            advice = f"{hint}strict=False (in a run strict_loading = False of the module) loads those that match."
            if self.reshaped:
                advice = "Give these the shapes that were saved, or reshape the loaded tensors in on_load_checkpoint."
            lines += self.problems[:20] or [advice]
            raise CheckpointMismatchError("\n  ".join([f"{path} does not fit:", *lines]))
        return LoadReport(missing=(*self.missing, *self.kept), unexpected=tuple(self.unexpected))


def match_names(
    live: Shapes, aliases: Mapping[str, str], stored: Shapes, homes: Mapping[str, str] | None = None
) -> Match:
    """Find each live tensor among the stored ones. Both map a name to a full shape, each tensor once.

    ``aliases``: another name of a tied live tensor to its name. ``homes``: each searched name to its key in ``stored``.
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
            found.reshaped[name] = f"{stored[source]} there, {shape} here"
    for alias, name in aliases.items():
        source = found.sources.get(name)
        if source is not None and homes.get(alias, source) != source:
            found.doubles.append((homes[alias], source))
    known = {homes[name] for name in (*live, *aliases) if name in homes}
    found.unexpected.extend(name for name in dict.fromkeys(homes.values()) if name not in known)
    return found


def match_keys(
    found: Manifest,
    state: StateDict,
    names: Names,
    wanted: Mapping[str, Mapping[str, LiveTensor]],
    *,
    kept: set[str] | None,
) -> Match:
    """Match the ``wanted`` tensors, by prefix and FQN. ``kept``: FQNs that may be missing, besides those whose digests
    are compared. None: any may be missing.
    """
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
    matched = match_names({key: tuple(tensor.shape) for key, tensor in live.items()}, aliases, stored, homes)
    own = {names.aliases.get(name, name) for name in state.kept}
    matched.problems.extend(
        f"{fqn} was taken from the module's own state_dict(), which has no values of it under this engine: delete the "
        "name there"
        for fqn in own
        if names.tensors[fqn].shape != tuple(wanted[layout.MODEL_PREFIX][fqn].shape)
    )
    if kept is not None:
        prefixes = (layout.MODEL_PREFIX, layout.AVERAGE_PREFIX)
        digested = {prefix + fqn for fqn in found.facts.frozen for prefix in prefixes}
        left = {layout.MODEL_PREFIX + fqn for fqn in own | kept}
        matched.kept.extend(key for key in matched.missing if key in left - digested)
        matched.missing[:] = [key for key in matched.missing if key not in left | digested]
    matched.unexpected[:] = [key for key in matched.unexpected if key.startswith(layout.MODEL_PREFIX)]
    return matched


def by_key(wanted: Mapping[str, Mapping[str, LiveTensor]]) -> dict[str, LiveTensor]:
    return {prefix + fqn: tensor for prefix, tensors in wanted.items() for fqn, tensor in tensors.items()}


def further_names(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Invert ``aliases``: name of each tied tensor to its other names."""
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    return further
