"""A LightningModule from a checkpoint directory, on one process."""

import io
import warnings
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule

from lightning_shard.checkpoint.files.layout import StrPath
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.engines.materialize import Materializer

M = TypeVar("M", bound=LightningModule)


def load_from_checkpoint(module_class: type[M], path: StrPath, *, strict: bool | None = None, **kwargs: Any) -> M:
    """Build a module as ``module_class.load_from_checkpoint`` does and fill it from the directory ``path``.

    For one process: every tensor is whole and on the host. A module that ``configure_model`` builds on the meta
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The state dict in .* contains no parameters|Found keys that are in")
        # Lightning builds the module and calls its hooks; the tensors follow.
        module = module_class.load_from_checkpoint(stand_in, strict=False, weights_only=True, **kwargs)
    # What is on the meta device gets memory; buffers that a checkpoint does not have get their values.
    materializer = Materializer(module, device=torch.device("cpu"), seed=0)
    materializer.fill(materializer.fqns)
    load_training_state(checkpoint, module=module, strict=module.strict_loading if strict is None else strict)
    return module
