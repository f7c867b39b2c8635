"""The aligned contract, held against a ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_shard.errors import PrecisionContractError
from lightning_shard.precision.ledger.record import STATE, Entry, Ledger, short
from lightning_shard.precision.policy import PrecisionPolicy

_WHERE = {
    "prepared": "after the strategy prepared it",
    "optimizer": "in the optimizer's groups",
    "accumulated": "as the gradient held between micro-batches",
    "gradient": "as the gradient handed to the optimizer",
    "step": "at the optimizer step",
    "reduction": "where gradients are reduced over ranks",
}
_FIX = {
    "prepared": "Leave its dtype alone, and let the strategy cast",
    "optimizer": "Build the optimizer in configure_optimizers from self.parameters()",
    "accumulated": "Remove what casts gradients",
    "gradient": "Remove what casts or replaces gradients before the step",
    "step": "Remove the code that casts it after the fit's start",
    "reduction": "Remove the hook that casts gradients for their reduction",
    STATE: "Use an optimizer that keeps its state in its parameters' dtype",
}


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A tensor whose dtype is not what the contract says."""

    name: str
    stage: str
    found: str
    required: str

    def text(self) -> str:
        """What is where in which dtype, and which it must be."""
        slot = self.stage.removeprefix(STATE)
        where = _WHERE.get(self.stage) or f"in the optimizer's state {slot!r}"
        return f"{self.name} is {self.found} {where}, required is {self.required}"

    @property
    def fix(self) -> str:
        """What to do about it."""
        return _FIX.get(self.stage) or _FIX[STATE]


def violations(ledger: Ledger, policy: PrecisionPolicy) -> list[Violation]:
    """What in ``ledger`` breaks the contract under ``policy``; the dtypes that are not there yet are not looked at.

    Trainable parameters and their gradients are in the policy's dtypes; so is the optimizer's state, or wider; a
    reduction is not narrower than the policy's. Frozen parameters and buffers have the dtype that they were loaded
    in, and so have the states of metrics before the first step, which the user's own updates may change.
    """
    found = [v for name, entry in ledger.entries.items() for v in _of_entry(name, entry, policy)]
    for reduction in ledger.reductions:
        if reduction.dtype.itemsize < policy.reduce.itemsize:
            last = f", after that of {reduction.after}," if reduction.after else ""
            name = f"A gradient{last} in {reduction.operation} of {reduction.numel} elements"
            found.append(_violation(name, "reduction", reduction.dtype, policy.reduce))
    return list(dict.fromkeys(found))


def _violation(name: str, stage: str, found: torch.dtype, required: torch.dtype) -> Violation:
    return Violation(name=name, stage=stage, found=short([found]), required=short([required]))


def _of_entry(name: str, entry: Entry, policy: PrecisionPolicy) -> Iterator[Violation]:
    if entry.kind in ("trainable", "not in the module"):
        exact = dict.fromkeys(("prepared", "optimizer", "gradient", "step"), policy.master)
        exact["accumulated"] = policy.accumulate
    else:
        before = entry.column("loaded")
        stages = ("prepared",) if entry.kind == "metric state" else ("prepared", "step")
        exact = dict.fromkeys(stages, next(iter(before))) if before else {}
    for stage, dtypes in entry.stages.items():
        for dtype in sorted(dtypes, key=str):
            if stage.startswith(STATE):
                # Steps are counted in integers, masks are boolean; 8 bits are a quantised moment.
                if dtype.itemsize < policy.master.itemsize and dtype != torch.bool:
                    yield _violation(name, stage, dtype, policy.master)
            elif stage in exact and dtype != exact[stage] and not dtype.is_complex:
                yield _violation(name, stage, dtype, exact[stage])


def contract_error(found: Sequence[Violation], when: str) -> PrecisionContractError:
    """The error that names what ``violations`` found, the first ones of many."""
    shown = "; ".join(v.text() for v in found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return PrecisionContractError(
        f"The aligned precision contract is broken {when}: {shown}. {found[0].fix}, or use the strategy's name without "
        "_aligned, which does not hold the contract."
    )
