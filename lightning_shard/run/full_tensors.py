"""Reading and changing a full parameter, gradient or optimizer state by FQN, the same on every engine; and a
LightningModule from a checkpoint directory, on one process.
"""

import io
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_shard.checkpoint.files.layout import StrPath
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.checkpoint.optimizer_state import optimizer_slot
from lightning_shard.checkpoint.state_dict import follow_names
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.materialize import Materializer
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import alone
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.full import gather_full, scatter_full
from lightning_shard.tensors.names import fqns


def full_tensor(trainer: Trainer, fqn: str, kind: str = "parameter") -> Tensor | None:
    """A copy of a full tensor, the same on every rank. Collective: all ranks call it.

    Args:
        trainer: in a run with a strategy of this package; optimizer state and gradients are there in a fit alone.
        fqn: the parameter's name in the LightningModule, as in its ``named_parameters()`` before the fit.
        kind: "parameter": what the optimizer steps (the master weights); "gradient": reduced over all ranks, there
            from backward to the step (ZeRO-1 and -2 of one optimizer reduce it once, in manual optimization at the
            step: from ``on_before_optimizer_step``); else the optimizer's name of a slot, such as "exp_avg".

    Returns:
        The tensor in the dtype that it is held in; None for a gradient or a slot that is not there.

    Raises:
        ConfigurationError: another strategy, or no such parameter, with the nearest names.
    """
    return read_full(*_in_run(trainer), fqn, kind, device=trainer.strategy.root_device)


def set_full_tensor(trainer: Trainer, fqn: str, value: Tensor, kind: str = "parameter") -> None:
    """Give a full tensor new values, on every rank and where forward sees them. Collective: all ranks call it.

    Args:
        trainer: as for `full_tensor`.
        fqn: as for `full_tensor`.
        value: equal on all ranks, of the full tensor's shape; it is cast to the dtype that the tensor is held in.
        kind: as for `full_tensor`.

    Raises:
        ConfigurationError: as for `full_tensor`; a gradient or slot that is not there; another shape.
    """
    write_full(*_in_run(trainer), fqn, value, kind)


def _in_run(trainer: Trainer) -> tuple[Engine, Checkpoints]:
    strategy = trainer.strategy
    if not isinstance(checkpoints := getattr(strategy, "checkpoints", None), Checkpoints):
        raise ConfigurationError(
            f"the Trainer's strategy is {type(strategy).__name__}, but full tensors are read from a strategy of "
            "lightning_shard, such as shard_fsdp."
        )
    return strategy.engine, checkpoints  # type: ignore[attr-defined]


def read_full(
    engine: Engine, checkpoints: Checkpoints, fqn: str, kind: str = "parameter", *, device: torch.device
) -> Tensor | None:
    live = _live(engine, checkpoints, fqn, kind)
    return None if live is None else gather_full(live, device=device)


def write_full(engine: Engine, checkpoints: Checkpoints, fqn: str, value: Tensor, kind: str = "parameter") -> None:
    live = _live(engine, checkpoints, fqn, kind)
    if live is None:
        raise ConfigurationError(f"{fqn} has no {kind} now: look with full_tensor, which gives None then.")
    if tuple(live.shape) != tuple(value.shape):
        raise ConfigurationError(
            f"the new {kind} of {fqn} has shape {tuple(value.shape)}, but must have {tuple(live.shape)}: all ranks "
            "give the full tensor."
        )
    scatter_full(value, live)
    if kind == "parameter":
        engine.publish()


def _live(engine: Engine, checkpoints: Checkpoints, fqn: str, kind: str) -> LiveTensor | None:
    if kind == "parameter":
        checkpoints.synchronize()
    names, tensors = fqns(checkpoints.module), engine.tensors
    name = names.canonical(fqn)
    if kind == "parameter":
        return tensors.masters().get(name, names.tensors[name])
    if kind == "gradient":
        return tensors.gradient(name, names.tensors[name])
    engine.before_saving()
    return optimizer_slot(tensors.optimizers(), names, name, kind)


M = TypeVar("M", bound=LightningModule)


@alone()
def load_from_checkpoint(module_class: type[M], path: StrPath, *, strict: bool | None = None, **kwargs: Any) -> M:
    """Build a module as ``module_class.load_from_checkpoint`` does and fill it from the directory ``path``.

    Each process by itself: every tensor is full and on the host. A module that ``configure_model`` builds on the meta
    device is given memory first, and needs every tensor to be in the checkpoint.

    Args:
        module_class: the class that was trained; its ``save_hyperparameters`` values in the checkpoint are its
            arguments.
        path: a checkpoint directory.
        strict: refuse missing and unexpected tensors; None: the module's own ``strict_loading``.
        **kwargs: arguments in place of those in the checkpoint, or that it does not have.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one that does not fit.
    """
    checkpoint = open_checkpoint(path)
    state = checkpoint.trainer_state
    stand_in = io.BytesIO()
    torch.save({**{k: v for k, v in state.items() if k != "optimizer_states"}, "state_dict": {}}, stand_in)
    stand_in.seek(0)
    state_dict: Mapping[str, Any] = {}

    def follow(module: M, loaded: dict[str, Any]) -> None:
        nonlocal state_dict
        state_dict = loaded["state_dict"] = checkpoint.state_dict()
        module_class.on_load_checkpoint(module, loaded)
        state_dict, loaded["state_dict"] = loaded["state_dict"], {}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The state dict in .* contains no parameters|Found keys that are in")
        # Lightning builds the module and calls its hooks; the tensors follow.
        hooks = {"on_load_checkpoint": follow, "load_state_dict": nn.Module.load_state_dict}
        reader = cast(type[M], type(module_class.__name__, (module_class,), hooks))
        module = reader.load_from_checkpoint(stand_in, strict=False, weights_only=True, **kwargs)
        module.__class__ = module_class
    # What is on the meta device gets memory; buffers that a checkpoint does not have get their values.
    materializer = Materializer(module, device=torch.device("cpu"), seed=0)
    materializer.fill(materializer.fqns)
    strict = module.strict_loading if strict is None else strict
    edited, strict = follow_names(module, checkpoint.manifest, state_dict, strict=strict)
    load_training_state(checkpoint, module=module, strict=strict, state=edited)
    return module
