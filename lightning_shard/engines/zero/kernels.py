"""The kernels that DeepSpeed compiles on first use: those that a run needs, and missing build tools."""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        has_toolkit = home is not None and os.access(Path(home, "bin", "nvcc"), os.X_OK)
        tools = {
            "a C++ compiler (apt-get install g++)": shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]),
            "ninja on PATH (pip install ninja)": cpp_extension.is_ninja_available(),
            "a CUDA toolkit with nvcc (set CUDA_HOME, or torch_adam: true in params)": not on_device or has_toolkit,
        }
        lacking = [tool for tool, is_there in tools.items() if not is_there]
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
