"""The kernels that DeepSpeed compiles on first use: which a run needs, missing build tools, and stale locks.

Without these checks a missing compiler is an assertion inside a constructor, and a stale lock an endless wait.
"""

import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
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
        needed |= {"async_io", "pin_memory"} | ({"gds"} if config.get("aio", {}).get("use_gds") else set())
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        needed.add("quantizer")
    if optimizer is not None:
        needed |= {BY_OPTIMIZER[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in BY_OPTIMIZER}
    elif (section := config.get("optimizer")) and not section.get("params", {}).get("torch_adam"):
        kind = "adam" if section["type"].lower() in ("adamw", "muon") else section["type"].lower()
        made = f"cpu_{kind}" if devices[0] in ("cpu", "nvme") and kind != "lamb" else f"fused_{kind}"
        needed |= {made} & BUILDERS.keys()
    return tuple(sorted(needed))


def missing_build_tools(needed: tuple[str, ...], device_type: str) -> list[str]:
    """List the reasons why this machine can't compile the kernels, with Debian's package names."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils import cpp_extension

    problems = []
    for name in (name for name in needed if not _is_loaded(name)):
        builder: Any = get_accelerator().get_op_builder(BUILDERS[name])
        if builder is None or builder.__name__ == "NotImplementedBuilder":
            problems.append(f"DeepSpeed has no kernel {name} for {device_type}: use another option or optimizer")
            continue
        on_device, home = device_type == "cuda" and issubclass(builder, CUDAOpBuilder), cpp_extension.CUDA_HOME
        lacking = [
            tool
            for tool, is_there in {
                "a C++ compiler (apt-get install g++)": shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]),
                "ninja on PATH (pip install ninja)": cpp_extension.is_ninja_available(),
                "a CUDA toolkit with nvcc (install it, set CUDA_HOME, or use torch_adam: true in the section's params)": not on_device
                or (home and os.access(Path(home, "bin", "nvcc"), os.X_OK)),
            }.items()
            if not is_there
        ]
        # Without a CUDA toolkit a builder fails with a TypeError.
        if not lacking and not builder().is_compatible(verbose=False):
            lacking = ["a library that its builder looks for (ds_report names it, for async_io libaio-dev)"]
        problems += [f"DeepSpeed compiles {name}, but this machine lacks {tool}" for tool in lacking]
    return problems


def _is_loaded(name: str) -> bool:
    """Whether a kernel is loaded in this process, or was compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder

    return name in OpBuilder._loaded_ops or bool(installed_ops.get(name, False))


def lock_path(name: str) -> Path | None:
    """The lock of torch's build of a kernel (``torch.utils.file_baton.FileBaton``). None: nothing is built."""
    from torch.utils.cpp_extension import _get_build_directory

    return None if _is_loaded(name) else Path(_get_build_directory(name, verbose=False)) / "lock"


def stale_lock_problem(name: str) -> str | None:
    """Report a lock that a killed build has left, on which DeepSpeed would wait forever: no process on this machine has
    it open, and its folder was quiet for `QUIET` seconds. A build on another machine writes meanwhile.
    """
    path = lock_path(name)
    with suppress(FileNotFoundError):  # The builder may end meanwhile.
        if path is None or time.time() - max(f.stat().st_mtime for f in (path, *path.parent.iterdir())) < QUIET:
            return None
        processes = psutil.process_iter(["open_files"])  # None for processes that this user may not inspect.
        if str(path.resolve()) not in (file.path for each in processes for file in each.info["open_files"] or ()):
            return (
                f"{path} is the lock of a build that was killed: no process on this machine has it open, and nothing "
                f"was written in its folder for {QUIET:g} s, but DeepSpeed would wait for its end forever. If no other "
                "machine is building there, delete it"
            )
    return None
