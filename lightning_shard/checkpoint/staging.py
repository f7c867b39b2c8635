"""Copies of this rank's boxes on the host, from which a save goes on while training changes the tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.checkpoint.plan import Values


class HostBuffers:
    """Memory for one copy of what a rank writes, kept from one save to the next.

    Pinned for boxes that come from a CUDA device, so that all copies of a save run at once. Of boxes that are mapped
    from files (NVMe offload) the copies are in files too: there is no memory for them.
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(self, boxes: Sequence[MetadataIndex], values: Values) -> Values:
        """Copy ``boxes`` and give the copies, which stay as they are until the next call; devices are waited for."""
        kept = {index: buffer for index in boxes if (buffer := self._buffers.get(index)) is not None}
        self._buffers = kept  # what other boxes had is free before more is taken
        devices = set()
        for index in boxes:
            source = values(index)
            buffer = kept.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = kept[index] = _new_buffer(source)
            buffer.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return kept.__getitem__

    def free(self) -> None:
        """Give the memory back."""
        self._buffers = {}


def _new_buffer(source: Tensor) -> Tensor:
    name = source.untyped_storage().filename if source.device.type == "cpu" else None
    if name is None or source.numel() == 0:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    handle, path = tempfile.mkstemp(prefix=".staged-", dir=Path(name).parent)
    os.close(handle)
    try:
        flat = torch.from_file(path, shared=True, size=source.numel(), dtype=source.dtype)
    finally:
        os.unlink(path)  # mapped, the file lives until the memory is given back or the process ends
    return flat.view(source.shape)
