"""Telling the forms of checkpoints apart, and opening any of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lightning_shard.checkpoint import commit
from lightning_shard.checkpoint.layout import OPTIMIZER_PREFIX
from lightning_shard.checkpoint.lightning_file import ModuleNames, open_full
from lightning_shard.checkpoint.save import OPTIMIZER_STATES
from lightning_shard.checkpoint.stored import Stored, open_portable


def is_stock(path: str | os.PathLike[str]) -> bool:
    """Whether at ``path`` is what another library, or the ``full`` form, looks like; not whether it can be read."""
    path = Path(path)
    commit.recover(path)
    return path.is_file()


def open_any(
    path: str | os.PathLike[str],
    names: ModuleNames | None = None,
    *,
    optimizers: Literal["named", "numbered", "none"] = "named",
) -> Stored:
    """The checkpoint at ``path``, of whatever form; no tensor of the model or an optimizer is read yet.

    ``names``: those of the live module, for forms that number an optimizer's parameters. ``optimizers``: whether
    such numbers are refused without ``names`` or kept (to look at), or all optimizer state is left out.

    Raises CheckpointError.
    """
    path = Path(path)
    stored = open_full(path, names, number=optimizers != "named") if is_stock(path) else open_portable(path)
    return without_optimizers(stored) if optimizers == "none" else stored


def without_optimizers(stored: Stored) -> Stored:
    """The same with weights only."""
    return replace(
        stored,
        tensors={key: tensor for key, tensor in stored.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)},
        trainer_state={key: value for key, value in stored.trainer_state.items() if key != OPTIMIZER_STATES},
    )
