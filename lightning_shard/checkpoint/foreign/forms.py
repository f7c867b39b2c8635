"""Telling the forms of checkpoints apart, and opening any of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lightning_shard.checkpoint.background_writes import settle
from lightning_shard.checkpoint.files.contents import Contents
from lightning_shard.checkpoint.files.layout import GRADIENT_PREFIXES, MANIFEST, OPTIMIZER_STATES, StrPath
from lightning_shard.checkpoint.files.place import StorePath, place
from lightning_shard.checkpoint.foreign.deepspeed import deepspeed_folder, open_deepspeed
from lightning_shard.checkpoint.foreign.fsdp_directory import is_stock_fsdp, open_stock_fsdp
from lightning_shard.checkpoint.foreign.lightning_file import ModuleNames, open_full
from lightning_shard.checkpoint.load import open_portable


def is_foreign(path: StrPath) -> bool:
    """Whether at ``path`` is what another library, or the ``full`` form, looks like; not whether it can be read."""
    where = place(path)
    settle()
    if isinstance(where, StorePath):
        return False  # Only portable directories are read there.
    path = where
    if not path.is_dir():
        return path.is_file()
    return not (path / MANIFEST).exists() and (is_stock_fsdp(path) or deepspeed_folder(path) is not None)


def open_any(
    path: StrPath,
    names: Callable[[], ModuleNames] | None = None,
    *,
    optimizers: Literal["named", "numbered", "none"] = "named",
) -> Contents:
    """The checkpoint at ``path``, of whatever form; no tensor of the model or an optimizer is read yet.

    ``names``: asked for those of the live module, by forms that number an optimizer's parameters. ``optimizers``:
    whether such numbers are refused without ``names`` or kept (to look at), or all optimizer state is left out.

    Raises CheckpointError.
    """
    if not is_foreign(path):
        stored = open_portable(path)
    elif (path := Path(path)).is_file():
        stored = open_full(path, names() if names is not None else None, number=optimizers != "named")
    else:
        stored = open_stock_fsdp(path) if is_stock_fsdp(path) else open_deepspeed(path)
    if optimizers != "none":
        return stored
    left_out = {*stored.slots, *(key for key in stored.tensors if key.startswith(GRADIENT_PREFIXES))}
    return replace(
        stored,
        tensors={key: tensor for key, tensor in stored.tensors.items() if key not in left_out},
        slots={},
        trainer_state={key: value for key, value in stored.trainer_state.items() if key != OPTIMIZER_STATES},
    )
