"""The ledger: dtypes of a run, read from live tensors in its first step, as plain data, a table and JSON. `violations`
compares it with the aligned contract.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_shard.errors import PrecisionContractError
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.text import columns

Kind = Literal["trainable", "frozen", "buffer", "metric state", "not in the module"]

STAGES = ("loaded", "prepared", "optimizer", "product", "accumulated", "gradient", "step")
"""In the order of a run. ``optimizer``: in its groups. ``product``: the float8 dtype in a linear layer's product.
``accumulated``: the gradient held between micro-batches. ``gradient``, ``step``: gradient and parameter handed to the
optimizer. ``state.<slot>`` follows."""

STATE = "state."

_SHORT = {dtype: word for word, dtype in DTYPES.items()}
_SHORT |= {torch.float64: "fp64", torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8"}


def short(dtypes: Iterable[torch.dtype]) -> str:
    """``"fp32"``, or ``"bf16+fp32"`` of several dtypes."""
    return "+".join(sorted(_SHORT.get(d, _name(d)) for d in dtypes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(kw_only=True)
class Entry:
    """The dtypes of one tensor of a run, by stage."""

    kind: Kind
    stages: dict[str, set[torch.dtype]] = field(default_factory=dict)

    def add(self, stage: str, dtype: torch.dtype) -> None:
        self.stages.setdefault(stage, set()).add(dtype)

    def column(self, stage: str) -> set[torch.dtype]:
        """The dtypes at ``stage``, over all slots for ``"state"``."""
        if stage != "state":
            return self.stages.get(stage, set())
        return {d for name, dtypes in self.stages.items() if name.startswith(STATE) for d in dtypes}


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The dtypes of a run, seen on this rank."""

    entries: Mapping[str, Entry]  # By the FQN of a parameter, a buffer or a metric's state.
    reduced_in: frozenset[torch.dtype] = frozenset()  # The dtypes in which the engine reduces gradients over ranks.
    loss: frozenset[torch.dtype] = frozenset()  # The dtypes of the losses of the first step.

    def dtypes(self, name: str, stage: str) -> set[torch.dtype]:
        """The dtypes of ``name``, maybe none, at ``stage``: one of `STAGES` or ``state.<slot>``."""
        return self.entries[name].stages.get(stage, set())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values without engine or rank: one row per combination of dtypes, with its count."""
        rows = [
            {
                "what": self.entries[names[0]].kind,
                "count": len(names),
                "first": names[0],
                "dtypes": {s: "+".join(sorted(map(_name, d))) for s, d in self.entries[names[0]].stages.items()},
            }
            for names in self._groups()
        ]
        loss, reduction = (sorted(map(_name, dtypes)) for dtypes in (self.loss, self.reduced_in))
        return {"tensors": rows, "loss": loss, "reduction": reduction}

    def table(self) -> str:
        """One line per distinct combination of dtypes, with its number of tensors."""
        stages = [s for s in (*STAGES, "state") if any(e.column(s) for e in self.entries.values())]
        lines = [["dtypes, as measured", "count", *stages]]
        for names in self._groups():
            entry = self.entries[names[0]]
            lines.append([entry.kind, str(len(names)), *(short(entry.column(s)) or "-" for s in stages)])
        reduced = f"gradients reduced in: {short(self.reduced_in) or '-'}"
        return "\n".join([columns(lines), f"loss: {short(self.loss) or '-'}", reduced])

    def _groups(self) -> list[list[str]]:
        found: dict[Any, list[str]] = defaultdict(list)
        for name, entry in self.entries.items():
            stages = tuple(sorted((s, tuple(sorted(map(str, d)))) for s, d in entry.stages.items()))
            found[entry.kind, stages].append(name)
        return list(found.values())


def violations(ledger: Ledger, policy: PrecisionPolicy) -> list[str]:
    """Sentences about dtypes in ``ledger`` that break the contract under ``policy``. Trainable parameters and their
    gradients must have the policy's dtypes, optimizer state and reductions none that is narrower. Frozen parameters,
    buffers and, before the first step, metrics must keep the dtype that they were loaded in.
    """
    found = [text for name, entry in ledger.entries.items() for text in _of_entry(name, entry, policy)]
    low = [dtype for dtype in ledger.reduced_in if dtype.itemsize < policy.reduce.itemsize]
    return [*found, *(_violation("A gradient", "reduction", dtype, policy.reduce) for dtype in low)]


def _violation(name: str, stage: str, found: torch.dtype, required: torch.dtype) -> str:
    return f"{name} is {short([found])} at the stage {stage}, required is {short([required])}"


def _of_entry(name: str, entry: Entry, policy: PrecisionPolicy) -> Iterator[str]:
    if entry.kind in ("trainable", "not in the module"):
        exact = dict.fromkeys(("prepared", "optimizer", "gradient", "step"), policy.master)
        exact["accumulated"] = policy.accumulate
        if torch.float64 in entry.column("loaded"):
            exact = dict.fromkeys(exact, torch.float64)
    else:
        before = entry.column("loaded")
        stages = ("prepared",) if entry.kind == "metric state" else ("prepared", "step")
        exact = dict.fromkeys(stages, next(iter(before))) if before else {}
    for stage, dtypes in entry.stages.items():
        for dtype in sorted(dtypes, key=str):
            if stage.startswith(STATE):
                # Integers are counts, masks, and moments that an optimizer quantises itself, alike on every engine.
                if dtype.is_floating_point and dtype.itemsize < policy.master.itemsize:
                    yield _violation(name, stage, dtype, policy.master)
            elif stage in exact and dtype != exact[stage] and not dtype.is_complex:
                yield _violation(name, stage, dtype, exact[stage])


def contract_error(found: Sequence[str], when: str) -> PrecisionContractError:
    """The error that names the first of ``found``."""
    shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return PrecisionContractError(
        f"The aligned precision contract is broken {when}: {shown}. Leave all casts to the strategy: remove the code, "
        "the setting or the optimizer that makes it so, or use the strategy's name without _aligned, which does not "
        "hold the contract."
    )
