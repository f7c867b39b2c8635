"""What was measured, as plain data, a table and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_shard.text import columns

Kind = Literal["trainable", "frozen", "buffer", "metric state", "not in the module"]

STAGES = ("loaded", "prepared", "optimizer", "forward", "backward", "accumulated", "gradient", "step")
"""In the order of a run. ``optimizer``: in its groups; ``forward``: as modules see it; ``backward``: the gradient
with respect to that; ``accumulated``: the gradient held between micro-batches; ``gradient``, ``step``: gradient and
parameter that were handed to the optimizer. ``state.<slot>`` follows."""

STATE = "state."

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def short(dtypes: Iterable[torch.dtype]) -> str:
    """``"fp32"``, or ``"bf16+fp32"`` where there are several."""
    return "+".join(sorted(_SHORT.get(d, _name(d)) for d in dtypes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(kw_only=True)
class Entry:
    """The dtypes of one tensor of a run, by stage."""

    kind: Kind
    stages: dict[str, set[torch.dtype]] = field(default_factory=dict)

    def add(self, stage: str, dtype: torch.dtype) -> None:
        """Note that it was seen in ``dtype``."""
        self.stages.setdefault(stage, set()).add(dtype)

    def column(self, stage: str) -> set[torch.dtype]:
        """The dtypes at ``stage``; for ``"state"`` those of all slots."""
        if stage != "state":
            return self.stages.get(stage, set())
        return {d for name, dtypes in self.stages.items() if name.startswith(STATE) for d in dtypes}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A collective that summed gradients over ranks."""

    operation: str
    dtype: torch.dtype
    numel: int
    after: str  # The parameter whose gradient was computed last before it; empty if none was.


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The dtypes of a run, seen on this rank."""

    entries: Mapping[str, Entry]  # By the FQN of a parameter, a buffer or a metric's state.
    reductions: tuple[Reduction, ...]
    loss: frozenset[torch.dtype] = frozenset()  # The dtypes of the losses of the first step.

    def dtypes(self, name: str, stage: str) -> set[torch.dtype]:
        """The dtypes in which ``name`` was seen at ``stage``, one of `STAGES` or ``state.<slot>``; maybe none."""
        return self.entries[name].stages.get(stage, set())

    @property
    def reduced_in(self) -> set[torch.dtype]:
        """The dtypes in which gradients crossed the network; empty if no collective was seen."""
        return {r.dtype for r in self.reductions}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, which name neither engine nor rank: one row per combination of dtypes, with its count."""
        rows = [
            {
                "what": self.entries[names[0]].kind,
                "count": len(names),
                "first": names[0],
                "dtypes": {s: "+".join(sorted(map(_name, d))) for s, d in self.entries[names[0]].stages.items()},
            }
            for names in self._groups()
        ]
        return {
            "tensors": rows,
            "loss": sorted(map(_name, self.loss)),
            "reduction": sorted(map(_name, self.reduced_in)),
        }

    def table(self) -> str:
        """One line per distinct combination of dtypes, with the number of tensors that have it."""
        stages = [s for s in (*STAGES, "state") if any(e.column(s) for e in self.entries.values())]
        lines = [["dtypes, as measured", "count", *stages]]
        for names in self._groups():
            entry = self.entries[names[0]]
            lines.append([entry.kind, str(len(names)), *(short(entry.column(s)) or "-" for s in stages)])
        counts: dict[tuple[str, torch.dtype], int] = defaultdict(int)
        for reduction in self.reductions:
            counts[reduction.operation, reduction.dtype] += 1
        shown = [f"{name} {short([dtype])} ({count}x)" for (name, dtype), count in counts.items()]
        reduced = f"gradients reduced by: {', '.join(shown) or 'no collective'}"
        return "\n".join([columns(lines), f"loss: {short(self.loss) or '-'}", reduced])

    def _groups(self) -> list[list[str]]:
        found: dict[Any, list[str]] = defaultdict(list)
        for name, entry in self.entries.items():
            stages = tuple(sorted((s, tuple(sorted(map(str, d)))) for s, d in entry.stages.items()))
            found[entry.kind, stages].append(name)
        return list(found.values())
