"""Fake tensors, with shapes, dtypes and devices but no memory, on which a step is traced for FLOPs and bytes. They are
documented (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html) but lie below a private module.
"""

import copy
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.names import of_its_class, replace_tensors
from lightning_shard.tensors.tracing import TorchDispatchMode, tree_map_only

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode

M = TypeVar("M", bound=nn.Module)


@contextmanager
def fake_operations() -> Generator[None, None, None]:
    """Inside, operations give fake tensors, of real ones too. An outer mode of that kind stays on."""
    made = torch.empty(0)
    mode = made.fake_mode if isinstance(made, FakeTensor) else FakeTensorMode()
    with nullcontext() if isinstance(made, FakeTensor) else mode, _FakeInputs(mode):
        yield


class _FakeInputs(TorchDispatchMode):
    """Replaces real inputs by fake ones. torch's ``allow_non_fake_inputs`` runs ``x.add_(1)`` on the real ones."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor, static_shapes=True)


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors are fake, and real ones become fake when an operation reads them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_world(ranks: int) -> Generator[None, None, None]:
    """A process group of ``ranks`` whose rank 0 is this process, alone. ConfigurationError: it has one already."""
    if dist.is_initialized():
        raise ConfigurationError("This process has a process group already; plan in a process of its own.")
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake copy of ``tensor`` on the CPU. Copies of views of one storage are views of one storage."""
    if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor.detach())


def make_fake(root: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer of ``root`` by a fake one on the CPU. Ties stay ties."""
    replace_tensors(root, lambda tensor: as_fake(tensor, mode))


def meta_copy(module: M) -> M:
    """A deep copy of ``module`` (full) with its tensors on the meta device, ties kept. Copies of its other attributes
    may raise.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): of_its_class(t, torch.empty_like(t, device="meta")) for t in tensors})
