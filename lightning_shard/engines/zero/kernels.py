"""The kernels that DeepSpeed compiles on first use: which a run needs, whether they can be built, and stale locks.

Without these checks a missing compiler is an assertion, and a stale lock an endless wait, inside of a constructor.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

BY_OPTIMIZER = {
    **{f"DeepSpeedCPU{name}": f"cpu_{name.lower()}" for name in ("Adam", "Adagrad", "Lion")},
    **{f"Fused{name}": f"fused_{name.lower()}" for name in ("Adam", "Lamb", "Lion")},
}
"""DeepSpeed's optimizers that compile a kernel in their constructor."""

BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
    "gds": "GDSBuilder",
    "quantizer": "QuantizerBuilder",
    **{kernel: f"{name.removeprefix('DeepSpeed')}Builder" for name, kernel in BY_OPTIMIZER.items()},
}
"""Kernel to DeepSpeed's builder of it."""


def required_kernels(config: Mapping[str, Any], optimizer: Optimizer | None) -> tuple[str, ...]:
    """The kernels that a run compiles or loads, sorted; ``optimizer``: the user's, or None: the section's."""
    zero = config.get("zero_optimization", {})
    devices = [(zero.get(section) or {}).get("device") for section in ("offload_optimizer", "offload_param")]
    needed: set[str] = set()
    if "nvme" in devices:
        needed |= {"async_io", "pin_memory"}
        if config.get("aio", {}).get("use_gds"):
            needed.add("gds")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        needed.add("quantizer")
    made = optimizer_class(config) if optimizer is None and config.get("optimizer") else type(optimizer)
    needed |= {BY_OPTIMIZER[c.__name__] for c in made.__mro__ if c.__name__ in BY_OPTIMIZER}
    return tuple(sorted(needed))


def optimizer_class(config: Mapping[str, Any]) -> type:
    """What ``DeepSpeedEngine._configure_basic_optimizer`` makes of the section ``optimizer``, Muon's auxiliary one too.
    ImportError: of the package mup, which is not there.
    """
    from deepspeed import ops

    section, offload = config["optimizer"], config["zero_optimization"].get("offload_optimizer") or {}
    kind, on_host = section["type"].lower(), offload.get("device") in ("cpu", "nvme")
    if kind in ("adam", "adamw", "muon"):
        on_device = torch.optim.AdamW if section.get("params", {}).get("torch_adam") else ops.adam.FusedAdam
        kept = on_device is torch.optim.AdamW or not on_host
        return on_device if kept else ops.adam.DeepSpeedCPUAdam
    own: dict[str, tuple[type, type]] = {
        "adagrad": (torch.optim.Adagrad, ops.adagrad.DeepSpeedCPUAdagrad),
        "lamb": (ops.lamb.FusedLamb, ops.lamb.FusedLamb),
        "lion": (ops.lion.FusedLion, ops.lion.DeepSpeedCPULion),
    }
    if kind in own:
        return own[kind][on_host]
    of_mup = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
    found: type = getattr(import_module("mup") if kind in of_mup else torch.optim, of_mup.get(kind, section["type"]))
    return found


def lacking(needed: tuple[str, ...], device_type: str) -> list[str]:
    """What is missing to build the kernels on this machine, with the names of Debian's packages."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils import cpp_extension

    compiler, home = os.environ.get("CXX", "c++"), cpp_extension.CUDA_HOME
    found: dict[str, list[str]] = {}  # What to say to the kernels of which it is said.
    for name in (each for each in needed if not _is_there(each)):
        builder: Any = get_accelerator().get_op_builder(BUILDERS[name])
        lacks = []
        if builder is None or builder.__name__ == "NotImplementedBuilder":
            return [f"DeepSpeed has no kernel {name} for {device_type}: use another option or optimizer"]
        if shutil.which(shlex.split(compiler)[0]) is None:
            lacks.append(f"there is no C++ compiler {compiler!r}: apt-get install g++")
        if not cpp_extension.is_ninja_available():
            folder = Path(sys.executable).parent
            lacks.append(
                "there is no ninja on PATH: apt-get install ninja-build, or put the bin folder of this environment on "
                f"PATH ({folder}), where pip install ninja puts it"
            )
        on_device = device_type == "cuda" and issubclass(builder, CUDAOpBuilder)
        if on_device and not (home and os.access(Path(home, "bin", "nvcc"), os.X_OK)):  # else it is a TypeError
            lacks.append(
                f"there is no CUDA toolkit with nvcc here: install that of CUDA {torch.version.cuda}, which torch was "
                "built with, or set CUDA_HOME to it. Or use torch's AdamW: torch_adam: true in the section's params"
            )
        if not lacks and not builder().is_compatible(verbose=False):
            lacks.append(f"its builder says that it can't be here: {_PACKAGES.get(name, 'see ds_report')}")
        for text in lacks:
            found.setdefault(text, []).append(name)
    return [f"DeepSpeed compiles {', '.join(names)}, but {text}" for text, names in found.items()]


_PACKAGES = {"async_io": "apt-get install libaio-dev"}


def _is_there(name: str) -> bool:
    """Whether a kernel is loaded in this process, or was compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder

    return name in OpBuilder._loaded_ops or bool(installed_ops.get(name, False))


def lock(name: str) -> Path | None:
    """Where torch puts a kernel's lock (``torch.utils.file_baton.FileBaton``), which killed builders leave; or None."""
    from torch.utils.cpp_extension import _get_build_directory

    return None if _is_there(name) else Path(_get_build_directory(name, verbose=False)) / "lock"


def stale_lock(name: str, *, wait: bool) -> str | None:
    """What to say of a lock on which DeepSpeed would wait forever: no process on this machine has it open, and nothing
    was written beside it lately. Until then another machine may build there, for whose end this waits if it is to.
    """
    path = lock(name)
    while path is not None and path.exists():
        with suppress(FileNotFoundError):  # The builder may end meanwhile.
            seen = psutil.process_iter(["open_files"])  # None for those that this user may not look at.
            if str(path.resolve()) in (file.path for process in seen for file in process.info["open_files"] or ()):
                break
            written = max((beside.stat().st_mtime for beside in path.parent.iterdir()), default=0)
            if time.time() - written > QUIET and path.exists():
                return (
                    f"{path} is the lock of a build that was killed: no process on this machine has it open, and "
                    f"nothing was written beside it for {QUIET:g} s, but DeepSpeed would wait for its end forever. If "
                    "no other machine is building there, delete it"
                )
            if not wait:
                break
            time.sleep(1)
    return None


QUIET = 120.0  # Seconds, in which a build that goes on writes one of its files.
