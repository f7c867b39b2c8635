"""What a portable checkpoint looks like on disk: names of files and of tensors.

``NAME.ckpt/`` holds torch.distributed.checkpoint files (``.metadata`` and ``__<rank>_<n>.distcp``, tensors only),
``trainer.pt`` (everything else, loads with ``weights_only=True``) and ``manifest.json``. The manifest is written
last: a directory without a valid one is not a checkpoint.

Tensor keys are ``model.<fqn>`` and ``optimizer.<i>.<fqn>.<slot>``.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from lightning_shard.errors import CheckpointCorruptError

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"
METADATA = ".metadata"
DATA_SUFFIX = ".distcp"

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


def model_key(fqn: str) -> str:
    """Key of a parameter or persistent buffer."""
    return f"{MODEL_PREFIX}{fqn}"


def optimizer_key(index: int, fqn: str, slot: str) -> str:
    """Key of one optimizer slot, for example ``optimizer.0.encoder.weight.exp_avg``."""
    return f"{OPTIMIZER_PREFIX}{index}.{fqn}.{slot}"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and hexadecimal sha256 of a file."""

    size: int
    sha256: str


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``; ValueError for what is no dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def check_relative(name: str) -> str:
    """``name`` if it is a file name inside the checkpoint's directory; CheckpointCorruptError if it leaves it."""
    path = PurePosixPath(name)
    if not path.parts or "\\" in name or "\0" in name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise CheckpointCorruptError(
            f"file name {name!r} is not a plain relative path; a checkpoint's files lie inside its directory"
        )
    return name


def regular_file(directory: Path, name: str, entry: FileEntry) -> Path:
    """Path of the file ``name``; CheckpointCorruptError if it is missing, special, outside or of the wrong size."""
    path = directory / check_relative(name)
    try:
        # A link that leads out of the directory, or a pipe that would block, is not what was written.
        inside = path.resolve(strict=True).is_relative_to(directory.resolve())
        info = path.stat()
    except OSError as error:
        raise CheckpointCorruptError(f"{path} can't be read ({error.strerror}), though {MANIFEST} lists it") from error
    if not inside or not stat.S_ISREG(info.st_mode):
        raise CheckpointCorruptError(f"{path} is not a regular file inside the checkpoint")
    if info.st_size != entry.size:
        raise CheckpointCorruptError(f"{path} has {info.st_size} bytes, {MANIFEST} says {entry.size}")
    return path


def holds_only_checkpoint_files(directory: Path) -> bool:
    """Whether every entry of ``directory`` has a name that a save gives; True for an empty one."""
    ours = {MANIFEST, TRAINER_STATE, METADATA}
    return all(entry.name in ours or entry.name.endswith(DATA_SUFFIX) for entry in directory.iterdir())
