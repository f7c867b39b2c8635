"""Models on the meta device, and their values on one rank, replicated and sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.engine import PlannedRun, Run
from lightning_shard.engines.fully_shard import FSDPOptions, FullyShard
from lightning_shard.engines.replicate import Replicate
from lightning_shard.engines.torch_ddp import DDPOptions, prepare_replica
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.mesh import build_mesh
from lightning_shard.precision.policy import policy_from
from tests.models import llama, whole

CPU = torch.device("cpu")
SEED = 11


class Angles(nn.Module):
    """Buffers that are in no checkpoint: whoever builds the model must fill them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.register_buffer("mask", torch.empty(5, 5, dtype=torch.bool), persistent=False)
        self.register_buffer("steps", torch.empty(5, dtype=torch.int64), persistent=False)
        self.register_buffer("turns", torch.empty(5, dtype=torch.complex64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(5) / 7)
        self.mask.copy_(torch.ones(5, 5).tril().bool())
        self.steps.copy_(torch.arange(5))
        self.turns.copy_(torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


class Block(nn.Module):
    """A block of layers with ties inside, uneven sizes, running statistics and a list of parameters of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.attention = nn.MultiheadAttention(width, 2, bias=True, add_bias_kv=True)
        self.recurrent = nn.LSTM(width, width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.again = nn.Linear(width, 2 * width + 1, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=0)
        self.angles = Angles()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.conv = nn.Conv1d(6, 3, 2)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class Root(nn.Module):
    """In the place of the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = Model()
        self.gain = nn.Parameter(torch.full((3,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return x


def tied_llama() -> nn.Module:
    root = nn.Module()
    with torch.device("meta"):
        root.model = llama(vocab_size=32)
    return root


def values(root: nn.Module) -> dict[str, Tensor]:
    """Everything by every name that it has, whole."""
    tensors = itertools.chain(root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
    return {n: whole(t) for n, t in tensors}


def replicated(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    root = make()
    prepare_replica(root, device=CPU, seed=SEED)
    return values(root)


def sharded(
    make: Callable[[], nn.Module],
    shape: tuple[int, int],
    *,
    units: Any = "auto",
    precision: str = "32-true",
    replicate_only: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    root = make()
    engine: FullyShard | Replicate = engine_of(units=units, **options)
    if replicate_only:
        engine = Replicate(DDPOptions(), ForwardOptions(), at_boundary=False)
    engine.prepare(root, run_on(shape, precision))
    return values(root)


def engine_of(**options: Any) -> FullyShard:
    return FullyShard(FSDPOptions(**options), ForwardOptions(), at_boundary=False)


def run_on(shape: tuple[int, int], precision: str = "32-true") -> Run:
    """An evaluation on a mesh of so many replicas and shards."""
    ranks = shape[0] * shape[1]
    planned = PlannedRun(ranks=ranks, per_node=ranks, policy=policy_from(precision, aligned=True), aligned=True)
    return Run(planned=planned, device=CPU, mesh=build_mesh(shape, device_type="cpu"), seed=SEED, fitting=False)
