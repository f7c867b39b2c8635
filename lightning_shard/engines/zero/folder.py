"""The folder in which one run keeps what it offloads to NVMe."""

from __future__ import annotations

import copy
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECTIONS = ("offload_optimizer", "offload_param")
_BLOCK = 4096


def nvme_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Section of DeepSpeed's configuration to the directory that it names, of those that offload to NVMe."""
    zero = config["zero_optimization"]
    asked = {name: zero.get(name) or {} for name in SECTIONS}
    return {name: section["nvme_path"] for name, section in asked.items() if section.get("device") == "nvme"}


def in_run_folder(config: Mapping[str, Any], run: str) -> tuple[dict[str, Any], list[Path]]:
    """The configuration with a folder of this run under each ``nvme_path``, and these folders.

    DeepSpeed names files by rank alone and deletes what it finds there, so that runs in one folder would destroy each
    other's. The names end in ``run``, the same on every rank.
    """
    moved = copy.deepcopy(dict(config))
    folders = []
    for name, path in nvme_paths(config).items():
        folder = Path(os.path.abspath(path)) / f"lightning_shard-{run}"
        moved["zero_optimization"][name]["nvme_path"] = str(folder)
        folders.append(folder)
    return moved, list(dict.fromkeys(folders))


def problem_with(folder: Path, *, rank: int) -> str | None:
    """Make ``folder`` and try what DeepSpeed does in it; what is wrong, or None.

    DeepSpeed opens its files with ``O_DIRECT`` (``csrc/aio/common/deepspeed_aio_common.cpp``), which not every file
    system takes.
    """
    parent = folder.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_directly(folder / f"try-{rank}")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"nvme_path is {str(parent)!r}, but files can't be written there ({error.strerror or error})"
    return None


def _write_directly(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        # Anonymous mappings begin at a page, as O_DIRECT needs it.
        with mmap.mmap(-1, _BLOCK) as block:
            os.write(file, block)
    finally:
        os.close(file)
        path.unlink()


def remove(folder: Path, *, rank: int) -> None:
    """Unlink this rank's files, and the folder with the last rank's.

    What is mapped from a file stays there until nothing refers to it.
    """
    for files in folder.glob(f"zero_stage_3/*/rank{rank}"):
        shutil.rmtree(files, ignore_errors=True)
    for empty in (*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder):
        try:
            empty.rmdir()
        except OSError:
            # Other ranks' files are there still, or another rank was faster.
            continue
