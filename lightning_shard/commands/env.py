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

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else None
    compiler = environ.get("CXX", "c++")
    versions = {
        **library_versions(),
        "system": platform.platform(),
        "CUDA of torch": torch.version.cuda,
        "NCCL": nccl,
        "GPU driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "compiler": _first_line(*compiler.split(), "--version"),
        "ninja": _first_line("ninja", "--version"),
        "nvcc": _first_line("nvcc", "--version", line=-1),
    }
    cores = f"{os.cpu_count()} CPUs ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return {
        "versions": {name: value or "none" for name, value in versions.items()},
        "devices": [f"{p.name}, {show_bytes(p.total_memory)}, sm_{p.major}{p.minor}" for p in gpus] + [cores],
        "environment": _variables(environ),
        "kernels of DeepSpeed": _kernels("cuda" if gpus else "cpu"),
        "never run on such a machine": _never_run(bool(gpus), environ),
    }


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    own = [re.escape(word) for word in (str(Path.home()), environ.get("USER", "")) if len(word) > 2 and word != "root"]
    shown = {}
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIXES):
            hidden = _PRIVATE.search(name) or "@" in value
            shown[name] = "(set)" if hidden else re.sub("|".join(own) or "$^", "~", value)
    return shown


def _kernels(device_type: str) -> dict[str, str]:
    if importlib.util.find_spec("deepspeed") is None:
        return {}
    from lightning_shard.engines.zero.kernels import states

    return states(device_type)


def _never_run(gpus: bool, environ: Mapping[str, str]) -> list[str]:
    """What no test or measurement of this package covers; README.md, "Limits", says the same."""
    several = int(environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 or "GROUP_WORLD_SIZE" in environ
    found = {
        "GPUs: NCCL, streams and pinned memory are tested by `pytest -m gpu` alone, and nothing is measured": gpus,
        "links between machines: several nodes were virtual ones on one machine": several,
        f"{platform.system()}: tests run on Linux alone, and DeepSpeed is not there": platform.system() != "Linux",
        f"{platform.machine()} processors: tests run on x86_64": platform.machine() not in ("x86_64", "AMD64"),
    }
    return [text for text, here in found.items() if here]


def _first_line(*command: str, line: int = 0) -> str | None:
    """A line of what a program prints; None where there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip().splitlines()[line] if ended.returncode == 0 and ended.stdout.strip() else None
