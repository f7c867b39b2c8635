"""Giving saved optimizer state to live optimizers, as it was planned to fit them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint import optimizer_state
from lightning_shard.checkpoint.match_optimizers import NewTensor, OptimizerPlan, SlotsPlan, unequal
from lightning_shard.checkpoint.optimizer_state import Values
from lightning_shard.errors import CheckpointMismatchError
from lightning_shard.tensors.flat import LiveTensor, has_tensors_inside, plain_slots


def read_scalars(plan: OptimizerPlan, read: Callable[[Mapping[str, Tensor]], object]) -> dict[str, Tensor]:
    """By stored key the scalars that flat tensors have once for all of their parameters, which ``read`` fills.
    CheckpointMismatchError: parameters in one flat tensor have different values.
    """
    shared = [(slots.index, slot, new) for slots in plan.slots for slot, new in slots.tensors.items() if new.is_shared]
    scalars = {key: torch.zeros((), dtype=new.dtype) for _, _, new in shared for key in new.keys.values()}
    read(scalars)
    problems = [unequal(i, slot, {fqn: scalars[key] for fqn, key in new.keys.items()}) for i, slot, new in shared]
    if found := [problem for problem in problems if problem is not None]:
        raise CheckpointMismatchError("\n  ".join(["the optimizer's state does not fit:", *found[:20]]))
    return scalars


def create_slots(plan: OptimizerPlan, scalars: Mapping[str, Tensor]) -> list[tuple[str, LiveTensor]]:
    """Give the optimizers exactly the saved slots, kept where they fit; returns those to be filled, with their keys."""
    planned = {id(slots.part.tensor) for slots in plan.slots}
    for optimizer in plan.optimizers:
        for tensor in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in planned]:
            del optimizer.state[tensor]
    wanted: list[tuple[str, LiveTensor]] = []
    for slots in plan.slots:
        part, live = slots.part, _with_its_classes(slots)
        plain = plain_slots(live)
        state = {k: v if part.flat is None else _like_live(plain.get(k), v) for k, v in slots.values.items()}
        for slot, new in slots.tensors.items():
            value = scalars[next(iter(new.keys.values()))] if new.is_shared else None
            if value is not None and _is_number(plain.get(slot)):
                state[slot] = _like_live(plain[slot], value.item())
                continue
            state[slot] = _tensor(slots, slot, plain.get(slot), new)
            if value is not None:
                state[slot].detach().copy_(value)
            else:
                wanted.extend((key, part.view(fqn, state[slot])) for fqn, key in new.keys.items())
        slots.optimizer.state[part.tensor] = _put_together(live, state)
    return wanted


def _with_its_classes(slots: SlotsPlan) -> Mapping[str, Any]:
    """The live state, or that of a first step where what was saved is inside of tensors of classes of their own."""
    part = slots.part
    live: Mapping[str, Any] = slots.optimizer.state.get(part.tensor, {})
    if live or part.flat is not None or not any("." in slot for slot in {**slots.values, **slots.tensors}):
        return live
    (shape,) = part.shapes.values()
    found = optimizer_state.state_of_small(slots.optimizer, part.tensor.detach().new_zeros(shape))
    return {} if found is None else found[0]


def _put_together(live: Mapping[str, Any], state: Values) -> Values:
    """``state`` with its plain tensors inside of those of the classes that ``live`` has."""
    for name, value in live.items():
        if has_tensors_inside(value):
            inside, settings = value.__tensor_flatten__()
            plain = {each: state.pop(f"{name}.{each}") for each in inside}
            state[name] = type(value).__tensor_unflatten__(plain, settings, value.size(), value.stride())
    return state


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


def _like_live(live: Any, value: Any) -> Any:
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
    has_its_shape = wanted.shape == tuple(stepped.shape) and not wanted.is_scalar
    if (
        isinstance(live, Tensor)
        and tuple(live.shape) == wanted.shape
        and live.dtype == wanted.dtype
        and isinstance(live, DTensor) == (has_its_shape and isinstance(stepped, DTensor))
    ):
        # What no parameter lies in stays zero; parameters that the checkpoint has no state of begin there.
        if slots.part.flat is not None:
            live.detach().zero_()
        return live
    if has_its_shape and slots.part.new_slot is not None:
        return slots.part.new_slot(slot)
    if has_its_shape:
        return torch.zeros_like(stepped.detach(), dtype=wanted.dtype, memory_format=torch.preserve_format)
    # As torch.optim does on load: a step count stays on the host unless a fused or captured step reads it.
    on_host = slot == "step" and not (slots.settings.get("capturable") or slots.settings.get("fused"))
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device="cpu" if on_host else stepped.device)
