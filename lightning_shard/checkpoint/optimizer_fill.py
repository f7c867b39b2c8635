"""Giving live optimizers the slots and hyperparameters that were planned for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.optimizer_load import NewTensor, OptimizerPlan, SlotsPlan, unequal
from lightning_shard.errors import CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor


def shared_scalars(plan: OptimizerPlan) -> dict[str, Tensor]:
    """Empty host tensors, by key, for the scalars that flat tensors have once for all of their parameters.

    Filled and checked with `check_scalars`, they go to `create_slots`.
    """
    return {
        key: torch.zeros((), dtype=slots.slots[slot].dtype)
        for slots in plan.slots
        for slot, keys in slots.keys.items()
        if _is_shared(slots, slot)
        for key in keys.values()
    }


def check_scalars(plan: OptimizerPlan, scalars: Mapping[str, Tensor]) -> None:
    """CheckpointMismatchError where parameters in one flat tensor have different values of what it has once."""
    problems = [
        unequal(slots.index, slot, {fqn: scalars[key] for fqn, key in keys.items()})
        for slots in plan.slots
        for slot, keys in slots.keys.items()
        if _is_shared(slots, slot)
    ]
    if found := [problem for problem in problems if problem is not None]:
        raise CheckpointMismatchError("\n  ".join(["the optimizer's state does not fit:", *found[:20]]))


def create_slots(plan: OptimizerPlan, scalars: Mapping[str, Tensor]) -> dict[str, LiveTensor]:
    """Give the optimizers exactly the saved slots; returns by key those that are to be filled from the files.

    A tensor that is there already with the right shape, dtype and placement is kept. Flat tensors are zero where no
    parameter lies; ``scalars`` as `shared_scalars` gave them, filled.
    """
    planned = {id(slots.part.tensor) for slots in plan.slots}
    for optimizer in plan.optimizers:
        for tensor in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in planned]:
            del optimizer.state[tensor]
    wanted: dict[str, LiveTensor] = {}
    for slots in plan.slots:
        part = slots.part
        live = slots.optimizer.state.get(part.tensor, {})
        state = {slot: _created(slots, slot, live.get(slot), scalars) for slot in slots.slots}
        slots.optimizer.state[part.tensor] = state
        for slot, keys in slots.keys.items():
            if not _is_shared(slots, slot):
                wanted.update({key: part.view(fqn, state[slot]) for fqn, key in keys.items()})
    return wanted


def load_groups(plan: OptimizerPlan) -> None:
    """Give the live groups their saved hyperparameters; a live tensor keeps its identity and takes the value."""
    for group, values in plan.groups:
        for name, value in values.items():
            live = group.get(name)
            if isinstance(live, Tensor):
                with torch.no_grad():
                    live.copy_(torch.as_tensor(value, dtype=live.dtype))
            else:
                group[name] = value


def _is_shared(slots: SlotsPlan, slot: str) -> bool:
    wanted = slots.slots[slot]
    return slots.part.flat is not None and isinstance(wanted, NewTensor) and wanted.is_scalar


def _created(slots: SlotsPlan, slot: str, live: Any, scalars: Mapping[str, Tensor]) -> Any:
    wanted = slots.slots[slot]
    if not isinstance(wanted, NewTensor):
        return wanted if slots.part.flat is None else _as_live(live, wanted)
    if not _is_shared(slots, slot):
        return _tensor(slots, slot, live, wanted)
    value = scalars[next(iter(slots.keys[slot].values()))]
    if _is_number(live):
        return _as_live(live, value.item())
    tensor = _tensor(slots, slot, live, wanted)
    with torch.no_grad():
        return tensor.copy_(value)


def _as_live(live: Any, value: Any) -> Any:
    """A saved number in the form in which an optimizer over flat tensors keeps it: a number, or a scalar tensor."""
    if not _is_number(value):
        return value
    if isinstance(live, Tensor) and live.ndim == 0:
        return torch.full_like(live, value)
    return type(live)(value) if _is_number(live) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tensor(slots: SlotsPlan, slot: str, live: Any, wanted: NewTensor) -> Tensor:
    stepped = slots.part.tensor
    is_alike = wanted.shape == tuple(stepped.shape) and not wanted.is_scalar
    if (
        isinstance(live, Tensor)
        and tuple(live.shape) == wanted.shape
        and live.dtype == wanted.dtype
        and isinstance(live, DTensor) == (is_alike and isinstance(stepped, DTensor))
    ):
        # What no parameter lies in stays zero; parameters that the checkpoint has no state of begin there.
        if slots.part.flat is not None:
            live.detach().zero_()
        return live
    if is_alike and slots.part.new_slot is not None:
        return slots.part.new_slot(slot)
    if is_alike:
        return torch.zeros_like(stepped.detach(), dtype=wanted.dtype, memory_format=torch.preserve_format)
    # As torch.optim does on load: a step count stays on the host unless a fused or captured step reads it.
    on_host = slot == "step" and not (slots.settings.get("capturable") or slots.settings.get("fused"))
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu" if on_host else stepped.device)
