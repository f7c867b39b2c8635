"""Optimizer state by parameter name: slots as tensors, hyperparameters by group.

A slot of its parameter's shape is stored and cut like the parameter; a scalar tensor is stored whole, and one that
parameters share (the step count of a flat tensor) is stored for each of them. Slots that are no tensors (numbers,
None) and the groups' hyperparameters go to ``trainer.pt``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.layout import optimizer_key
from lightning_shard.checkpoint.stepped import Stepped, groups_of
from lightning_shard.errors import CheckpointError
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor, torch_optimizer
from lightning_shard.tensors.names import Names

# Non-tensor slots of one parameter, hyperparameters of one group: name to value.
Values = dict[str, Any]


def optimizer_tensors(optimizers: Sequence[AnyOptimizer], names: Names) -> dict[str, LiveTensor]:
    """``optimizer.<i>.<fqn>.<slot>`` to live tensor, or to what this rank's flat tensor has of it.

    Raises CheckpointError for a parameter that the module does not have, and for a slot of a sharded parameter that
    is neither a scalar nor of the parameter's shape: it can't be cut for other numbers of ranks.
    """
    tensors: dict[str, LiveTensor] = {}
    for index, part, slots in _slots(optimizers, names):
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                for fqn in part.shapes:
                    key = optimizer_key(index, fqn, slot)
                    if part.stored_shape(fqn, value) is None:
                        raise CheckpointError(uncut(key, tuple(value.shape), tuple(part.tensor.shape)))
                    tensors[key] = part.view(fqn, value)
    return tensors


def optimizer_groups(optimizers: Sequence[AnyOptimizer], names: Names) -> list[dict[str, Any]]:
    """Per optimizer what `optimizer_tensors` leaves out, in plain values: groups with FQNs, and non-tensor slots.

    ``{"class": str, "groups": [{"params": [fqn], **hyperparameters}], "slots": {fqn: {slot: value}}}``. A scalar
    tensor among the hyperparameters (a capturable learning rate) becomes a number.
    """
    described: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        groups = [
            {"params": group.names, **{k: _plain(v) for k, v in hyperparameters(group.settings).items()}}
            for group in groups_of(index, optimizer, names)
        ]
        described.append({"class": type(torch_optimizer(optimizer)).__qualname__, "groups": groups, "slots": {}})
    for index, part, slots in _slots(optimizers, names):
        values = {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)}
        for fqn in part.shapes if values else ():
            for slot, value in values.items():
                if part.is_cut and _holds_tensor(value):
                    raise CheckpointError(
                        f"{optimizer_key(index, fqn, slot)} is a {type(value).__name__} of tensors; of a sharded "
                        "parameter only scalars and tensors of its shape can be saved: use an optimizer without it"
                    )
            described[index]["slots"][fqn] = values
    return described


def _slots(optimizers: Sequence[AnyOptimizer], names: Names) -> Iterator[tuple[int, Stepped, Mapping[str, Any]]]:
    """Optimizer index, stepped tensor and its slots, of each that has state."""
    for index, optimizer in enumerate(optimizers):
        state = torch_optimizer(optimizer).state
        for group in groups_of(index, optimizer, names):
            for part in group.stepped:
                if part.tensor in state:
                    slots = state[part.tensor]
                    yield index, part, slots if part.flat is None else _with_tensor_step(slots)


def _with_tensor_step(slots: Mapping[str, Any]) -> dict[str, Any]:
    # Optimizers made for flat tensors count steps in a number; torch's own keep a scalar of this dtype for each
    # parameter (torch.optim.optimizer._get_scalar_dtype), and those read what is written here.
    step = slots.get("step")
    if isinstance(step, (int, float)):
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        return {**slots, "step": torch.tensor(step, dtype=dtype)}
    return dict(slots)


def uncut(key: str, slot: tuple[int, ...], parameter: tuple[int, ...]) -> str:
    """What is wrong with a slot of that shape, of a sharded parameter or flat tensor of that shape."""
    return (
        f"{key} has shape {slot}, its sharded parameter {parameter}: a slot that is neither a scalar nor of its "
        "parameter's shape can't be cut; use another optimizer, or replicate (DDP)"
    )


def hyperparameters(group: Mapping[str, Any]) -> Values:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().clone()
    return value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(part) for part in value)
    return isinstance(value, Tensor)
