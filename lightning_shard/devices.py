"""The devices beside CPUs that this machine has, of whichever kind: torch names them, and nothing here does."""

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch


def accelerator() -> torch.device | None:
    """The kind of device that this machine has to train on; None: CPUs alone, or MPS, over which no rank reduces."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else found


def types() -> list[str]:
    """Of the devices that this torch computes on, here or not."""
    found = torch.accelerator.current_accelerator()
    return ["cpu"] if found is None else ["cpu", found.type]


def visible() -> int:
    """How many of them this process sees."""
    return torch.accelerator.device_count() if accelerator() else 0


def name_of(device: torch.device) -> str:
    """As the maker calls it, such as "NVIDIA H100 80GB HBM3"; of a CPU its type."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def in_use() -> list[int]:
    """The current device's index, or none where this process has used no device: a look would begin to."""
    found = accelerator()
    begun = found is not None and torch.get_device_module(found).is_initialized()
    return [torch.accelerator.current_device_index()] if begun else []


def fork_rng(*, device: bool = True) -> AbstractContextManager[None]:
    """What is drawn inside leaves torch's generators as they were: the host's, and that of the ``device`` in use."""
    found = accelerator() if device else None
    return torch.random.fork_rng(in_use() if device else [], device_type="cuda" if found is None else found.type)


def cores() -> int:
    """How many of the host's this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_on_all_cores(device: torch.device, processes: int, environ: Mapping[str, str], *, says: bool) -> None:
    """Let torch, and DeepSpeed's kernels, step on the host with this process' part of the cores, of ``processes`` on
    this node. torchrun sets ``OMP_NUM_THREADS`` to 1 where nothing is set. What is set otherwise stays, and so does a
    CPU run's single thread: its products would round otherwise. ``says``: whether a line tells of it.
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
