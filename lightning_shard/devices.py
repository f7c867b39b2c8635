"""Accelerators of this machine, of any kind that torch knows."""

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch


def accelerator() -> torch.device | None:
    """Type of the machine's accelerator. None: only CPUs, or MPS, which has no collectives."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else found


def types() -> list[str]:
    """Device types of this torch build, even if the machine has no such device."""
    found = torch.accelerator.current_accelerator()
    return ["cpu"] if found is None else ["cpu", found.type]


def visible() -> int:
    """Number of accelerators that this process sees."""
    return torch.accelerator.device_count() if accelerator() else 0


def name_of(device: torch.device) -> str:
    """Product name, such as "NVIDIA H100 80GB HBM3". For a CPU it is the device type."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def in_use() -> list[int]:
    """Index of the current device in a list. Empty if this process has used none: asking would initialise it."""
    found = accelerator()
    begun = found is not None and torch.get_device_module(found).is_initialized()
    return [torch.accelerator.current_device_index()] if begun else []


def fork_rng(*, device: bool = True) -> AbstractContextManager[None]:
    """Restore torch's generators on leaving: the host's, and with ``device`` the current device's."""
    found = accelerator() if device else None
    return torch.random.fork_rng(in_use() if device else [], device_type="cuda" if found is None else found.type)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_on_all_cores(device: torch.device, processes: int, environ: Mapping[str, str], *, says: bool) -> None:
    """Let torch and DeepSpeed's kernels use this process' share of the cores, of ``processes`` on the node, for a step
    on the host.

    torchrun sets ``OMP_NUM_THREADS`` to 1 if it is unset. Any other value stays. A CPU run keeps its one thread,
    because more would change rounding. ``says``: warn about the change.
    """
    torchruns = "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1"
    threads = cores() // processes
    if device.type == "cpu" or not torchruns or torch.get_num_threads() > 1 or threads <= 1:
        return
    torch.set_num_threads(threads)
    if says:
        warnings.warn(
            "torchrun gives each process one thread (OMP_NUM_THREADS=1), but the offloaded optimizer steps on the "
            f"host: torch uses {threads} now, this process' part of the cores. Another OMP_NUM_THREADS stays.",
            stacklevel=2,
        )
