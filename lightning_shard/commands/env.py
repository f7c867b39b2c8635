"""``lightning-shard env``: what a report of a bug has to say of this machine, without secrets."""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
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
"""What variables begin with that torch, Lightning, DeepSpeed, NCCL and the launchers read."""

_PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|USER|ACCOUNT|COMMENT|COMMAND|_[UG]ID$|_DIR$|_NAME$")


def parser() -> argparse.ArgumentParser:
    parser = options_parser("env", f"{COMMANDS['env']} Values that may be private are not shown.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    # DeepSpeed's logger writes to what is stdout when it is imported.
    with contextlib.redirect_stdout(sys.stderr):
        found = describe(os.environ)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for title, content in found.items():
        rows = [*content.items()] if isinstance(content, Mapping) else [(line,) for line in content]
        print(f"{title}:\n" + "\n".join(f"  {line}" for line in columns(rows or [("none",)]).splitlines()))
    return 0


def describe(environ: Mapping[str, str]) -> dict[str, Any]:
    """Title to names with their values, or to lines."""
    import torch

    from lightning_shard.checkpoint.files.manifest import library_versions
    from lightning_shard.text import show_bytes

    kernels: dict[str, str] = {}
    if importlib.util.find_spec("deepspeed") is not None:
        from lightning_shard.engines.zero.kernels import states

        kernels = states("cuda" if torch.cuda.is_available() else "cpu")
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
        "kernels of DeepSpeed": kernels,
        "never run on such a machine": _never_run(bool(gpus), environ),
    }


def _never_run(gpus: bool, environ: Mapping[str, str]) -> list[str]:
    """What no test or measurement of this package covers; README.md, "Limits", says the same."""
    several = any(int(environ.get(name, "1")) > 1 for name in ("SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE"))
    here = f"{platform.system()} on {platform.machine()}"
    found = {
        "GPUs: NCCL, streams and pinned memory are tested by `pytest -m gpu` alone, and nothing is measured": gpus,
        "links between machines: several nodes were virtual ones on one machine": several,
        f"{here}: tests run on Linux on x86_64": here != "Linux on x86_64",
    }
    return [text for text, holds in found.items() if holds]


def _first_line(*command: str, line: int = 0) -> str | None:
    """A line of what a program prints; None where there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip().splitlines()[line] if ended.returncode == 0 and ended.stdout.strip() else None
