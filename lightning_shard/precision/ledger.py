"""The ledger: dtypes of a run, read from live tensors in its first step, as plain data, a table and JSON. `violations`
compares it with the aligned contract.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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


# By stage, words for the place of a tensor and the fix.
_TEXTS = {
    "prepared": ("after the strategy prepared it", "Leave its dtype alone, and let the strategy cast"),
    "optimizer": ("in the optimizer's groups", "Build the optimizer in configure_optimizers from self.parameters()"),
    "accumulated": ("as the gradient held between micro-batches", "Remove what casts gradients"),
    "gradient": ("as the gradient handed to the optimizer", "Remove what casts or replaces gradients before the step"),
    "step": ("at the optimizer step", "Remove the code that casts it after the fit's start"),
    "reduction": ("where gradients are reduced over ranks", "Remove the setting that reduces them so"),
}


class Violation(NamedTuple):
    """A tensor whose dtype breaks the contract."""

    name: str
    stage: str
    found: str
    required: str

    @property
    def texts(self) -> tuple[str, str]:
        """Words for the place and the fix."""
        place = f"in the optimizer's state {self.stage.removeprefix(STATE)!r}"
        return _TEXTS.get(self.stage, (place, "Use an optimizer that keeps its state in its parameters' dtype"))

    def text(self) -> str:
        return f"{self.name} is {self.found} {self.texts[0]}, required is {self.required}"


def violations(ledger: Ledger, policy: PrecisionPolicy) -> list[Violation]:
    """Violations of the contract under ``policy`` among the dtypes in ``ledger``. Trainable parameters and their
    gradients must have the policy's dtypes, optimizer state and reductions none that is narrower. Frozen parameters,
    buffers and, before the first step, metrics must keep the dtype that they were loaded in.
    """
    found = [v for name, entry in ledger.entries.items() for v in _of_entry(name, entry, policy)]
    low = [dtype for dtype in ledger.reduced_in if dtype.itemsize < policy.reduce.itemsize]
    found += [_violation("A gradient", "reduction", dtype, policy.reduce) for dtype in low]
    return list(dict.fromkeys(found))


def _violation(name: str, stage: str, found: torch.dtype, required: torch.dtype) -> Violation:
    return Violation(name, stage, short([found]), short([required]))


def _of_entry(name: str, entry: Entry, policy: PrecisionPolicy) -> Iterator[Violation]:
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


def contract_error(found: Sequence[Violation], when: str) -> PrecisionContractError:
    """The error that names the first of ``found``."""
    shown = "; ".join(v.text() for v in found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return PrecisionContractError(
        f"The aligned precision contract is broken {when}: {shown}. {found[0].texts[1]}, or use the strategy's name "
        "without _aligned, which does not hold the contract."
    )
