"""The one importer of torch's private parts for tracing without memory, guarded by version.

Fake tensors have a shape, a dtype and a device and no data; a fake process group has ranks and no peers. Neither has a
public path in torch 2.11 to 2.13.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError

FakeTensorMode: Callable[..., Any] | None
FakeStore: Callable[[], Any] | None
try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # a torch that moved them
    FakeTensorMode = FakeStore = None
    TorchDispatchMode = FakeTensor = object  # type: ignore[assignment,misc]


def require() -> None:
    """Refuse a torch without these parts.

    Raises:
        ConfigurationError: with the versions that have them.
    """
    if FakeTensorMode is None or FakeStore is None:
        raise ConfigurationError(
            f"torch {torch.__version__} has no fake tensors or no fake process group where torch 2.11 to 2.13 have "
            "them, so that a step can't be traced. Use one of these, or plan without activations: --no-trace."
        )


def fake_mode() -> Any:
    """A mode in which tensors have no data; real ones that are met become fake."""
    require()
    assert FakeTensorMode is not None
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A process group of ``ranks``, of which this process is rank 0 and all others are none."""
    require()
    assert FakeStore is not None
    if dist.is_initialized():
        raise ConfigurationError("This process has a process group already; plan in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_fake(tensor: Tensor, mode: Any) -> Tensor:
    """``tensor`` without data, on the CPU: views of one storage become views of one storage."""
    if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor.detach())


def make_fake(root: nn.Module, mode: Any) -> None:
    """Replace every parameter and buffer of ``root`` by one without data on the CPU; ties stay ties."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        for tensors in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new = as_fake(tensor, mode)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = (tensor, new)
                tensors[name] = made[id(tensor)][1]


def where(error: BaseException) -> str:
    """``file:line`` of the last frame of an error that is in nobody's library, or ``""``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    frames = [f for f in frames if "/lightning_shard/" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
