"""The kernels that DeepSpeed compiles on first use: which a run needs, whether they can be built, and stale locks.

They are compiled by ``torch.utils.cpp_extension.load`` between the optimizer's constructor and the first step, where
what is missing shows up as an assertion or an endless wait; here it is known before.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
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
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    section, offload = config["optimizer"], config["zero_optimization"].get("offload_optimizer") or {}
    kind, on_host = section["type"].lower(), offload.get("device") in ("cpu", "nvme")
    if kind in ("adam", "adamw", "muon"):
        if section.get("params", {}).get("torch_adam"):
            return torch.optim.AdamW
        return DeepSpeedCPUAdam if on_host else FusedAdam
    own: dict[str, tuple[type, type]] = {
        "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
        "lamb": (FusedLamb, FusedLamb),
        "lion": (FusedLion, DeepSpeedCPULion),
    }
    if kind in own:
        return own[kind][on_host]
    of_mup = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
    where, name = (import_module("mup"), of_mup[kind]) if kind in of_mup else (torch.optim, section["type"])
    found: type = getattr(where, name)
    return found


def lacking(needed: tuple[str, ...], device_type: str) -> list[str]:
    """What is missing to build the kernels on this machine, with the names of Debian's packages."""
    to_build = [name for name in needed if not _is_there(name)]
    if not to_build:
        return []
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    builders: dict[str, Any] = {name: get_accelerator().get_op_builder(BUILDERS[name]) for name in to_build}
    if unknown := [n for n, b in builders.items() if b is None or b.__name__ == "NotImplementedBuilder"]:
        return [f"DeepSpeed has no kernel {', '.join(unknown)} for {device_type}: use another option or optimizer"]
    what = f"DeepSpeed compiles {', '.join(to_build)}"
    problems = []
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        problems.append(f"{what}, but there is no C++ compiler {compiler!r}: apt-get install g++")
    if not is_ninja_available():
        problems.append(
            f"{what}, but there is no ninja on PATH: apt-get install ninja-build, or put the bin folder of this "
            f"environment on PATH ({Path(sys.executable).parent}), where pip install ninja puts it"
        )
    on_device = [name for name in to_build if device_type == "cuda" and issubclass(builders[name], CUDAOpBuilder)]
    # DeepSpeed's ``installed_cuda_version`` fails with a TypeError without it.
    has_toolkit = CUDA_HOME is not None and os.access(Path(CUDA_HOME, "bin", "nvcc"), os.X_OK)
    if on_device and not has_toolkit:
        instead = " Or use torch's AdamW: torch_adam: true in the section's params" if "fused_adam" in on_device else ""
        problems.append(
            f"DeepSpeed compiles {', '.join(on_device)}, but there is no CUDA toolkit with nvcc here: install that of "
            f"CUDA {torch.version.cuda}, which torch was built with, or set CUDA_HOME to it.{instead}"
        )
    if "async_io" in to_build and not problems and not _links_libaio(compiler):
        problems.append(f"{what}, but libaio can't be compiled against: apt-get install libaio-dev")
    return problems


def _is_there(name: str) -> bool:
    """Whether a kernel is loaded in this process, or was compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder

    return name in OpBuilder._loaded_ops or bool(installed_ops.get(name, False))


def _links_libaio(compiler: str) -> bool:
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("LDFLAGS", ""))]
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "uses_libaio.cpp")
        source.write_text(program)
        command = [*shlex.split(compiler), str(source), *flags, "-laio", "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


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
