"""A module with buffers, ties and extra state, its optimizer, and its names under each wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """Blocks, one of them called like a wrapper's attribute; a tied weight, a shared module, a normalisation."""

    def __init__(self, *, tie: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(4))
        self.embed = nn.Embedding(6, 4)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.module[0]
        self.head = nn.Linear(4, 6, bias=False)
        self.extra = Extra()
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.extra.seen += 1
        return self.head(self.again(self.module(self.embed(tokens))) * self.scale)


PARAMETERS = ["scale", "embed.weight", "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
BUFFERS = ["module.1.running_mean", "module.1.running_var", "module.1.num_batches_tracked"]
ALIASES = {"again.weight": "module.0.weight", "again.bias": "module.0.bias", "head.weight": "embed.weight"}


def wrapped(how: str) -> nn.Module:
    net = Net()
    if "inner" in how:
        net.module[0] = torch.compile(net.module[0])
        net.module[1] = checkpoint_wrapper(net.module[1])
        net.again = net.module[0]
    if "fsdp" in how:
        # One unit: its parameters have names in two parts of the tree.
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if "compile" in how:
        return torch.compile(net)
    return DistributedDataParallel(net) if "ddp" in how else net


def trained(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        net(torch.randint(0, 6, (5,))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def named(net: nn.Module, *fragments: str) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if any(f in name for f in fragments)]
