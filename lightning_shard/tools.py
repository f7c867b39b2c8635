"""The commands as functions: plan a run, migrate a configuration, verify, convert and export checkpoints."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_shard.arguments import read
from lightning_shard.checkpoint.files.layout import again_if_replaced
from lightning_shard.checkpoint.files.location import StorePath, location, refuse_url
from lightning_shard.checkpoint.files.manifest import FULL, PORTABLE
from lightning_shard.checkpoint.foreign.hugging_face_folders import export as export_contents
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any, verify
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.commands.migrate import Migrated, migrate
from lightning_shard.commands.plan import Plan, make_plan
from lightning_shard.errors import CheckpointError
from lightning_shard.precision.policy import DTYPES
from lightning_shard.precision.words import DType
from lightning_shard.text import parse_bytes

__all__ = ["Converted", "Migrated", "Plan", "convert", "export", "migrate", "plan", "verify"]

StrPath = str | os.PathLike[str]
T = TypeVar("T")


def plan(
    configs: StrPath | Sequence[StrPath],
    *,
    device_memory: str,
    nodes: int | None = None,
    devices: int | None = None,
    batch_size: int | None = None,
    compare: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Predict a run's memory per device and its traffic, without starting it. One process calls it.

    Args:
        configs: YAML files of the run. Later ones override earlier ones.
        device_memory: memory of a device, such as "80GB".
        nodes: nodes of the run. None: the configuration's.
        devices: devices on each node. None: the configuration's, or 1.
        batch_size: samples per device and micro-batch. None: as in the data's first batch.
        compare: predict every engine of the package too.
        options: further options of ``lightning-shard plan`` and of fit, such as
            ``{"intra-node": "450GB/s", "trainer.precision": "bf16-mixed"}``.

    Raises:
        ConfigurationError: a setting that the run itself would refuse, or an impossible number.
        UsageError: a configuration that can't be parsed.
    """
    files = [configs] if isinstance(configs, str | os.PathLike) else configs
    given = {"nodes": nodes, "devices": devices, "batch-size": batch_size, **(options or {})}
    words = [f"--device-memory={device_memory}", *(f"--{k}={v}" for k, v in given.items() if v is not None)]
    return make_plan([*words, *["--compare"] * compare, *(f"--config={os.fspath(file)}" for file in files)])


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of `convert`."""

    source_form: str
    """Form of the source."""

    path: Path | StorePath
    """The new checkpoint. In an object store ``str`` of it is its URL."""

    form: str
    """"portable" or "full"."""


def convert(
    path: StrPath, target: StrPath, *, form: Literal["portable", "full"] | None = None, weights_only: bool = False
) -> Converted:
    """Write a checkpoint of any form as a portable directory or as one stock Lightning file. One process calls it.

    Args:
        path: a checkpoint of this package, of stock Lightning, FSDP or DeepSpeed.
        target: path or URL of the new checkpoint, which must not exist.
        form: form of the new checkpoint. None: "full" for a portable directory, "portable" for all others.
        weights_only: leave the optimizers' state out.

    Raises:
        CheckpointError: ``target`` exists, or ``path`` is no checkpoint that can be read.
        ConfigurationError: an unknown form.
    """
    form = read(Literal["portable", "full"] | None, form, "form")
    where = location(target)
    if where.exists():
        raise CheckpointError(f"{target} exists: choose another path, or remove it")

    def write() -> Converted:
        stored = open_any(path, optimizers="none" if weights_only else "named")
        written = form or (FULL if stored.form == PORTABLE else PORTABLE)
        if written == FULL:
            refuse_url(target, "one file")
        (write_full if written == FULL else write_portable)(target, stored)
        return Converted(source_form=stored.form, path=where, form=written)

    return _written(target, write)


def export(
    path: StrPath,
    folder: StrPath,
    *,
    dtype: DType | None = None,
    module: str = "",
    ema: bool = False,
    max_shard_size: str = "5GB",
) -> list[Path]:
    """Write a checkpoint's weights as safetensors files with a Hugging Face index. Returns the files.

    Args:
        path: a checkpoint of any form.
        folder: folder of the new files. It is made if it does not exist.
        dtype: of floating-point tensors. None: as stored.
        module: FQN of a submodule to export alone, under its own names. "": all.
        ema: write the average of `EMACallback` instead of the weights.
        max_shard_size: bytes of tensors per file, such as "5GB".

    Raises:
        CheckpointError: nothing was written. With ``ema`` also: the checkpoint has no averages.
        ConfigurationError: an invalid size or dtype.
    """
    refuse_url(folder, "safetensors files")
    dtype, size = read(DType | None, dtype, "dtype"), parse_bytes(read(str, max_shard_size, "max_shard_size"))

    def write() -> list[Path]:
        stored, kind = open_any(path, optimizers="none"), DTYPES[dtype] if dtype else None
        stored = stored.averaged() if ema else stored
        return export_contents(stored, folder, dtype=kind, module=module, max_shard_bytes=size)

    return _written(folder, write)


def _written(target: StrPath, write: Callable[[], T]) -> T:
    try:
        return again_if_replaced(write)()
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise CheckpointError(f"while writing {os.fspath(target)}: {where}{error.strerror or error}") from error
