"""The devices beside CPUs that this machine has, of whichever kind: torch names them, and nothing here does."""

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
