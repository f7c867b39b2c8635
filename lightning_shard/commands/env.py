"""``lightning-shard env``: the facts of this machine that a bug report needs, without secrets."""

import argparse
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_shard.commands import COMMANDS
from lightning_shard.commands.options import options_parser
from lightning_shard.text import columns

_PREFIXES = (
    "CUDA", "CXX", "DS_", "GLOO_", "GROUP_", "LIGHTNING_", "LOCAL_", "MASTER_", "MAX_JOBS", "NCCL_", "NODE_RANK",
    "OMP_", "PL_", "PYTORCH_", "RANK", "ROLE_", "SLURM_", "TORCH", "TP_SOCKET_", "WORLD_SIZE",
)  # fmt: skip
"""Prefixes of the variables that torch, Lightning, DeepSpeed, NCCL and the launchers read."""

_PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|USER|ACCOUNT|COMMENT|COMMAND|_[UG]ID$|_DIR$|_NAME$")


def parser() -> argparse.ArgumentParser:
    return options_parser("env", f"{COMMANDS['env']} Values that may be private are not shown.")


def main(arguments: Sequence[str]) -> int:
    parser().parse_args(arguments)
    for title, content in describe(os.environ).items():
        rows = [*content.items()] if isinstance(content, Mapping) else [(line,) for line in content]
        print(f"{title}:\n" + "\n".join(f"  {line}" for line in columns(rows or [("none",)]).splitlines()))
    return 0


def describe(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections by title: names with their values, or lines."""
    import torch

    from lightning_shard.checkpoint.files.manifest import library_versions
    from lightning_shard.text import show_bytes

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    versions = {
        **library_versions(),
        "system": platform.platform(),
        "CUDA of torch": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "GPU driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "compiler": _first_line(*environ.get("CXX", "c++").split(), "--version"),
        "ninja": _first_line("ninja", "--version"),
        "nvcc": _first_line("nvcc", "--version", line=-1),
    }
    own = [re.escape(word) for word in (str(Path.home()), environ.get("USER", "")) if len(word) > 2 and word != "root"]
    variables = {
        name: "(set)" if _PRIVATE.search(name) or "@" in value else re.sub("|".join(own) or "$^", "~", value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES)
    }
    cores = f"{os.cpu_count()} CPUs ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return {
        "versions": {name: value or "none" for name, value in versions.items()},
        "devices": [*(f"{p.name}, {show_bytes(p.total_memory)}, sm_{p.major}{p.minor}" for p in gpus), cores],
        "environment": variables,
    }


def _first_line(*command: str, line: int = 0) -> str | None:
    """Return one line of a program's output, or None if the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip().splitlines()[line] if ended.returncode == 0 and ended.stdout.strip() else None
