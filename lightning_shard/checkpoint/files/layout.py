"""What a portable checkpoint looks like on disk: names of files and of tensors, and checks of its files.

``NAME.ckpt/`` holds torch.distributed.checkpoint files (``.metadata`` and ``__<rank>_<n>.distcp``, tensors only),
``trainer.pt`` (everything else, loads with ``weights_only=True``) and ``manifest.json``. The manifest is written
last: a directory without a valid one is not a checkpoint.

Tensor keys are ``model.<fqn>`` and ``optimizer.<i>.<fqn>.<slot>``. FQNs and slots have dots: what a key of the second
kind stands for is in the manifest (`SlotName`) and is not read from the key.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from lightning_shard.errors import CheckpointCorruptError

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"
METADATA = ".metadata"
DATA_SUFFIX = ".distcp"

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."

OPTIMIZER_STATES = "optimizer_states"
"""Key in ``trainer.pt`` of the optimizers' hyperparameters by group, and of their state that is no tensor."""

EXTRA_STATE = "module_extra_state"
"""Key in ``trainer.pt`` of what the module keeps beyond parameters and buffers."""

_BLOCK = 1 << 22


class SlotName(NamedTuple):
    """Which optimizer state a tensor is: ``exp_avg`` of ``encoder.weight`` in optimizer 0."""

    optimizer: int
    fqn: str
    slot: str

    @property
    def key(self) -> str:
        """The key of the tensor."""
        return f"{OPTIMIZER_PREFIX}{self.optimizer}.{self.fqn}.{self.slot}"


def model_key(fqn: str) -> str:
    """Key of a parameter or persistent buffer."""
    return f"{MODEL_PREFIX}{fqn}"


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


def check_file(directory: Path, name: str, entry: FileEntry, take: Callable[[bytes], object] | None = None) -> None:
    """Compare a file with its size and checksum; ``take`` is called with its bytes, block by block.

    Raises CheckpointCorruptError where they differ, and as `regular_file` does.
    """
    path, digest = regular_file(directory, name, entry), hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                if take is not None:
                    take(block)
    except OSError as error:
        raise CheckpointCorruptError(f"{path} can't be read: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise CheckpointCorruptError(
            f"{path} does not match its checksum: it was damaged or changed after it was written"
        )


def read_checked(directory: Path, name: str, entry: FileEntry) -> bytes:
    """The contents of a file after `check_file`: the bytes that were checked are the bytes that are returned."""
    blocks: list[bytes] = []
    check_file(directory, name, entry, blocks.append)
    return b"".join(blocks)


def listed(names: Iterable[str], *, most: int = 20) -> str:
    """The first names in order, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def holds_only_checkpoint_files(directory: Path) -> bool:
    """Whether every entry of ``directory`` has a name that a save gives; True for an empty one."""
    ours = {MANIFEST, TRAINER_STATE, METADATA}
    return all(entry.name in ours or entry.name.endswith(DATA_SUFFIX) for entry in directory.iterdir())
