"""A small module under each engine, tensors that are hard to shard, and what is compared of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.calls import live, save_module
from tests.models import whole


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen bf16 parameter, a scalar buffer, one without elements, one not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.tensor(float(seed)))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)) + self.frozen.float().sum())


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``kind``: "plain", "ddp", or "fsdp[-offload]-S" or "-RxS" for a mesh of one axis or of replicate x shard."""
    net: nn.Module = Net(seed)
    if kind.startswith("fsdp"):
        shape = tuple(int(n) for n in kind.rpartition("-")[2].split("x"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = CPUOffloadPolicy(pin_memory=False) if "offload" in kind else OffloadPolicy()
        fully_shard(net.body, mesh=mesh, offload_policy=policy)
        fully_shard(net, mesh=mesh, offload_policy=policy, ignored_params={net.frozen})
    elif kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1 * (seed + 1))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for shift in range(2):
        optimizer.zero_grad()
        net(torch.arange(6).roll(shift).view(2, 3)).square().mean().backward()
        optimizer.step()


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {key: whole(t) for key, t in live(net, [optimizer]).items()}


def save_trained(path: str, kind: str) -> dict[str, Tensor]:
    net, optimizer = build(kind, 0)
    step(net, optimizer)
    save_module(path, module=net, optimizers=[optimizer], trainer_state={"epoch": 3})
    return values(net, optimizer)


def odd_tensors(seed: int, *, cut: bool) -> dict[str, Tensor]:
    """Tensors that are hard to cut; DTensors over all ranks along the first axis where ``cut``."""
    torch.manual_seed(seed)
    plain = {
        "model.rows": torch.randn(5, 3),
        "model.one_row": torch.randn(1, 4),
        "model.vector": torch.randn(2),
        "model.bf16": torch.randn(3, 2, 2).to(torch.bfloat16),
        "model.half": torch.randn(7).to(torch.float16),
        "model.integers": torch.randint(-(2**62), 2**62, (4, 3)),
        "model.flags": torch.rand(5) > 0.5,
        "model.complex": torch.randn(3, dtype=torch.complex64),
        "model.empty": torch.empty(0, 4),
        "model.no_columns": torch.empty(3, 0),
        "model.special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "model.name.with.dots": torch.randn(2, 2),
        "model.transposed": torch.randn(4, 6).t(),
        "model.part_of_more": torch.randn(9, 9)[2:5, 3:7],
    }
    if cut:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        cut_tensors = {k: distribute_tensor(t.contiguous(), mesh, [Shard(0)]) for k, t in plain.items()}
        plain = {**plain, **cut_tensors}
    return {**plain, "model.scalar": torch.randn(()), "model.integer": torch.tensor(2**53 + 1)}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
