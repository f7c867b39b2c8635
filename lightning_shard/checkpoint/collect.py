"""What there is to save: a module, its optimizers and the rest of a run, under names that no engine changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_shard.checkpoint.layout import model_key
from lightning_shard.checkpoint.optimizer import optimizer_groups, optimizer_tensors
from lightning_shard.checkpoint.state import extra_state, model_aliases, model_tensors, reshard
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import fqns

OPTIMIZER_STATES = "optimizer_states"
EXTRA_STATE = "module_extra_state"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says about the run that wrote it."""

    engine: str
    """``"ddp"``, ``"fsdp"`` or ``"deepspeed"``."""

    policy: str
    """The precision policy in words."""

    ledger: Mapping[str, Any] = field(default_factory=dict)
    """The measured dtypes, in plain JSON values."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """Of a training state: ``name`` of the run, ``step`` and ``time``; rank 0's counts."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key of a tied name to the key of its tensor."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What is to be saved, on one rank."""

    tensors: Mapping[str, Any]
    """Key to this rank's plain tensor (the whole), DTensor or object with torch's checkpointable protocol."""

    trainer_state: Mapping[str, Any]
    """What ``trainer.pt`` is to hold; rank 0's counts."""

    info: CheckpointInfo

    first_counts: Collection[str] = ()
    """Keys of plain tensors whose values may differ between ranks: rank 0's count."""


def training_state(
    *,
    module: nn.Module,
    optimizers: Sequence[AnyOptimizer],
    trainer_state: Mapping[str, Any],
    info: CheckpointInfo,
    leave_out: Collection[str] = (),
    masters: Mapping[str, LiveTensor] | None = None,
    equal_buffers: bool = False,
) -> State:
    """What there is to save of a module (wrapped or not), its optimizers and the rest of the run. No communication.

    ``optimizer_states`` in ``trainer_state`` is replaced by the groups' hyperparameters, and ``module_extra_state``
    by what the module keeps beyond tensors. ``info.aliases`` is found here. No ``optimizers``: weights only.
    ``leave_out``: FQNs of tensors of the module that the checkpoint is not to have. ``masters``: FQN to what is saved
    as ``model.<fqn>`` in the place of the module's own tensor. ``equal_buffers``: all ranks have those of rank 0.
    """
    reshard(module)
    names = fqns(module)
    skipped = {model_key(fqn) for fqn in leave_out}
    kept = {key: tensor for key, tensor in model_tensors(module, masters).items() if key not in skipped}
    own: dict[str, Any] = {EXTRA_STATE: extra_state(module)}
    if optimizers:
        own[OPTIMIZER_STATES] = optimizer_groups(optimizers, names)
    buffers = {model_key(fqn) for fqn, tensor in names.tensors.items() if not isinstance(tensor, nn.Parameter)}
    return State(
        tensors=kept | optimizer_tensors(optimizers, names),
        trainer_state={**trainer_state, **own},
        info=replace(info, aliases={alias: key for alias, key in model_aliases(module).items() if key in kept}),
        first_counts=() if equal_buffers else buffers,
    )
