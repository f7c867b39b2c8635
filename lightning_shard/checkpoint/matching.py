"""Which stored tensors go to which live ones by name, tied names followed on both sides, and what does not fit."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_shard.checkpoint.files.layout import listed
from lightning_shard.errors import CheckpointMismatchError

_SHOWN = 20

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load left alone, which is nothing after a strict one, and what it replaced."""

    missing: tuple[str, ...] = ()
    """Asked for, not in the checkpoint: these tensors kept their values."""

    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not asked for."""

    averages: bool = False
    """Whether averages of weights were asked for, and read."""

    overridden: tuple[str, ...] = ()
    """Hyperparameters of optimizers that had another value here, with both, of which the first wins."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What was stored for which live tensors."""

    sources: dict[str, str] = field(default_factory=dict)
    """Name of a live tensor to the name that it is stored under."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    """Names with both shapes."""

    problems: list[str] = field(default_factory=list)
    """What else does not fit, in sentences."""

    def judge(self, path: str | os.PathLike[str], strict: bool) -> LoadReport:
        """What to report of a match that is good enough; CheckpointMismatchError of one that is not."""
        if not self.sources and (self.missing or self.unexpected):
            raise CheckpointMismatchError(
                f"nothing in {path} matches the model by name. It asks for {listed(self.missing)}; the checkpoint has "
                f"{listed(self.unexpected)}"
            )
        if self.reshaped or self.problems or (strict and (self.missing or self.unexpected)):
            lines = [f"{path} does not fit:"]
            for kind, keys in (
                ("missing in the checkpoint", self.missing),
                ("unexpected in the checkpoint", self.unexpected),
                ("of another shape", self.reshaped),
            ):
                if keys:
                    lines.append(f"  {kind} ({len(keys)}): {listed(keys)}")
            lines += [f"  {problem}" for problem in self.problems[:_SHOWN]]
            if not self.reshaped and not self.problems:
                lines.append("  strict=False loads what matches.")
            raise CheckpointMismatchError("\n".join(lines))
        return LoadReport(missing=tuple(self.missing), unexpected=tuple(self.unexpected))


def match(
    live: Shapes, live_aliases: Mapping[str, str], stored: Shapes, stored_aliases: Mapping[str, str] | None = None
) -> Match:
    """Find each live tensor among the stored ones.

    Args:
        live: name to full shape of each live tensor, under its canonical name.
        live_aliases: further name of a tied live tensor to its name in ``live``.
        stored: name to shape of each stored tensor.
        stored_aliases: as ``live_aliases``.
    """
    homes = {name: name for name in stored} | dict(stored_aliases or {})
    further: dict[str, list[str]] = {}
    for alias, name in live_aliases.items():
        further.setdefault(name, []).append(alias)
    found = Match()
    for name, shape in live.items():
        source = next((homes[n] for n in (name, *further.get(name, ())) if n in homes), None)
        if source is None:
            found.missing.append(name)
            continue
        found.sources[name] = source
        if stored[source] != shape:
            found.reshaped.append(f"{name} {stored[source]} there, {shape} here")
    known = {*found.sources.values(), *live, *live_aliases}
    found.unexpected.extend(name for name in stored if name not in known)
    return found
