"""The kernels that DeepSpeed compiles on first use: which a run needs, missing build tools, and stale locks.

Without these checks a missing compiler is an assertion inside a constructor, and a stale lock an endless wait.
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

QUIET = 120.0
"""Seconds in which a live build writes at least one of its files."""


def required_kernels(config: Mapping[str, Any], optimizer: Optimizer | None) -> tuple[str, ...]:
    """List the kernels that a run compiles or loads, sorted. Without ``optimizer`` the section's counts."""
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
    """Find the class that ``DeepSpeedEngine._configure_basic_optimizer`` makes of the section ``optimizer``, for Muon
    the class of its auxiliary Adam. ImportError: the package mup is not installed.
    """
    from deepspeed import ops

    section, offload = config["optimizer"], config["zero_optimization"].get("offload_optimizer") or {}
    kind, on_host = section["type"].lower(), offload.get("device") in ("cpu", "nvme")
    if kind in ("adam", "adamw", "muon"):
        if section.get("params", {}).get("torch_adam"):
            return torch.optim.AdamW
        return ops.adam.DeepSpeedCPUAdam if on_host else ops.adam.FusedAdam
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


def missing_build_tools(needed: tuple[str, ...], device_type: str) -> list[str]:
    """List the reasons why this machine can't compile the kernels, with Debian's package names."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils import cpp_extension

    builders: dict[str, Any] = {n: get_accelerator().get_op_builder(BUILDERS[n]) for n in needed if not _is_loaded(n)}
    absent = [n for n, made in builders.items() if made is None or made.__name__ == "NotImplementedBuilder"]
    if absent:
        return [f"DeepSpeed has no kernel {', '.join(absent)} for {device_type}: use another option or optimizer"]
    on_device = [n for n, made in builders.items() if device_type == "cuda" and issubclass(made, CUDAOpBuilder)]
    compiler, home = os.environ.get("CXX", "c++"), cpp_extension.CUDA_HOME
    found: dict[str, list[str]] = {}
    if builders and shutil.which(shlex.split(compiler)[0]) is None:
        found[f"there is no C++ compiler {compiler!r}: apt-get install g++"] = [*builders]
    if builders and not cpp_extension.is_ninja_available():
        found[
            "there is no ninja on PATH: apt-get install ninja-build, or pip install ninja and put the bin folder of "
            f"this environment on PATH ({Path(sys.executable).parent})"
        ] = [*builders]
    if on_device and not (home and os.access(Path(home, "bin", "nvcc"), os.X_OK)):
        found[
            f"there is no CUDA toolkit with nvcc here: install CUDA {torch.version.cuda}, which torch was built "
            "with, or set CUDA_HOME to it. Or use torch's AdamW: torch_adam: true in the section's params"
        ] = on_device
    if not found:  # Without a CUDA toolkit a builder fails with a TypeError.
        for name in (n for n, made in builders.items() if not made().is_compatible(verbose=False)):
            fix = "apt-get install libaio-dev" if name == "async_io" else "see ds_report"
            found[f"its builder says that it can't be here: {fix}"] = [name]
    return [f"DeepSpeed compiles {', '.join(names)}, but {text}" for text, names in found.items()]


def _is_loaded(name: str) -> bool:
    """Whether a kernel is loaded in this process, or was compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder

    return name in OpBuilder._loaded_ops or bool(installed_ops.get(name, False))


def lock_path(name: str) -> Path | None:
    """The lock of torch's build of a kernel (``torch.utils.file_baton.FileBaton``). None: nothing is built."""
    from torch.utils.cpp_extension import _get_build_directory

    return None if _is_loaded(name) else Path(_get_build_directory(name, verbose=False)) / "lock"


def stale_lock_problem(name: str, *, wait: bool) -> str | None:
    """Report a lock that a killed build has left, on which DeepSpeed would wait forever: no process on this machine has
    it open, and its folder was quiet for `QUIET` seconds. A build on another machine writes meanwhile. With ``wait``
    this returns after the end of such a build.
    """
    path = lock_path(name)
    while path is not None and path.exists():
        with suppress(FileNotFoundError):  # The builder may end meanwhile.
            processes = psutil.process_iter(["open_files"])  # None for processes that this user may not inspect.
            if str(path.resolve()) in (file.path for each in processes for file in each.info["open_files"] or ()):
                break
            written = max((file.stat().st_mtime for file in path.parent.iterdir()), default=0)
            if time.time() - written > QUIET and path.exists():
                return (
                    f"{path} is the lock of a build that was killed: no process on this machine has it open, and "
                    f"nothing was written in its folder for {QUIET:g} s, but DeepSpeed would wait for its end forever. "
                    "If no other machine is building there, delete it"
                )
            if not wait:
                break
            time.sleep(1)
    return None
