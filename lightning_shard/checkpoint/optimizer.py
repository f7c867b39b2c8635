"""Optimizer state by parameter name: slots as tensors, hyperparameters by group.

A slot of its parameter's shape is stored and cut like the parameter; a scalar tensor is stored whole. Slots that
are no tensors (numbers, None) and the groups' hyperparameters go to ``trainer.pt``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.layout import optimizer_key
from lightning_shard.checkpoint.state import Names
from lightning_shard.errors import CheckpointError

# Non-tensor slots of one parameter, hyperparameters of one group: name to value.
Values = dict[str, Any]


def optimizer_tensors(optimizers: Sequence[Optimizer], names: Names) -> dict[str, Tensor]:
    """``optimizer.<i>.<fqn>.<slot>`` to live tensor.

    Raises CheckpointError for a parameter that the module does not have, and for a slot of a sharded parameter that
    is neither a scalar nor of the parameter's shape: it can't be cut for other numbers of ranks.
    """
    tensors: dict[str, Tensor] = {}
    for index, fqn, parameter, slots in _slots(optimizers, names):
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                check_slot(optimizer_key(index, fqn, slot), tuple(value.shape), parameter)
                tensors[optimizer_key(index, fqn, slot)] = value
    return tensors


def optimizer_groups(optimizers: Sequence[Optimizer], names: Names) -> list[dict[str, Any]]:
    """Per optimizer what `optimizer_tensors` leaves out, in plain values: groups with FQNs, and non-tensor slots.

    ``{"class": str, "groups": [{"params": [fqn], **hyperparameters}], "slots": {fqn: {slot: value}}}``. A scalar
    tensor among the hyperparameters (a capturable learning rate) becomes a number.
    """
    described = []
    for index, optimizer in enumerate(optimizers):
        groups = []
        for position, group in enumerate(optimizer.param_groups):
            params = [parameter_name(index, position, place, p, names) for place, p in enumerate(group["params"])]
            groups.append({"params": params, **{k: _plain(v) for k, v in hyperparameters(group).items()}})
        described.append({"class": type(optimizer).__qualname__, "groups": groups, "slots": {}})
    for index, fqn, parameter, slots in _slots(optimizers, names):
        values = {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)}
        for slot, value in values.items():
            if _holds_tensor(value) and isinstance(parameter, DTensor):
                raise CheckpointError(
                    f"{optimizer_key(index, fqn, slot)} is a {type(value).__name__} of tensors; of a sharded "
                    "parameter only scalars and tensors of its shape can be saved: use an optimizer without it"
                )
        if values:
            described[index]["slots"][fqn] = values  # type: ignore[index]
    return described


def _slots(optimizers: Sequence[Optimizer], names: Names) -> Iterator[tuple[int, str, Tensor, Mapping[str, Any]]]:
    """Optimizer index, FQN, parameter and slots of each parameter that has state."""
    for index, optimizer in enumerate(optimizers):
        for position, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                fqn = parameter_name(index, position, place, parameter, names)
                if parameter in optimizer.state:
                    yield index, fqn, parameter, optimizer.state[parameter]


def parameter_name(index: int, position: int, place: int, parameter: Tensor, names: Names) -> str:
    fqn = names.of(parameter)
    if fqn is None:
        raise CheckpointError(
            f"optimizer {index} steps a parameter of shape {tuple(parameter.shape)} (group {position}, position "
            f"{place}) that the module does not have: make the optimizer from the module's parameters after the "
            "module was sharded"
        )
    return fqn


def check_slot(key: str, shape: tuple[int, ...], parameter: Tensor) -> None:
    if isinstance(parameter, DTensor) and shape not in ((), tuple(parameter.shape)):
        raise CheckpointError(
            f"{key} has shape {shape}, its sharded parameter {tuple(parameter.shape)}: a slot that is neither a "
            "scalar nor of its parameter's shape can't be cut; use another optimizer, or replicate (DDP)"
        )


def hyperparameters(group: Mapping[str, Any]) -> Values:
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
