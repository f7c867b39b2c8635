"""Numbers of the device, read on the host when they are needed and not before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_host_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a small tensor to the host; what is returned waits for that copy alone, and gives it.

    What was launched on the device after this call is not waited for.
    """
    if tensor.device.type != "cuda":
        copy = tensor.detach().to("cpu", copy=True)
        return lambda: copy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read
