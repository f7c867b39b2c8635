"""What a rank has in memory while a model on the meta device gets its values, and while bf16 masters become fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightning_shard.engines.torch_ddp import prepare_replica
from lightning_shard.precision.casting import cast_trainable_parameters
from tests.engines.meta_models import CPU, SEED, engine_of, run_on
from tests.groups import sampled
from tests.harness import run_distributed


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time, views counted once, meta tensors not at all.

    ``dtype``: count tensors of this one alone.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and self.dtype in (None, tensor.dtype):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        return sum(size for _, size in self.live.values())


WIDTH, DEPTH = 32, 16


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        return x


UNIT_BYTES = (WIDTH + 1) * WIDTH * 4


def _peaks() -> tuple[int, int, int]:
    world = dist.get_world_size()
    with LiveBytes() as whole:
        root: nn.Module = Deep()
        prepare_replica(root, device=CPU, seed=SEED)
    with LiveBytes() as cut:
        root = Deep()
        engine_of().prepare(root, run_on((1, world)))
    return whole.peak, cut.peak, cut.now()


def _fp32_peaks(copies: int) -> tuple[int, int, int]:
    """Most bytes in fp32 on this rank, replicated and sharded, of a model that was loaded in bf16; those that stay."""
    seen = []
    for engine in ("whole", "cut"):
        root = nn.Module()
        root.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        root.to(torch.bfloat16)
        with LiveBytes(torch.float32) as live:
            if engine == "whole":
                prepare_replica(root, device=CPU, seed=SEED)
                upcast = cast_trainable_parameters(root, torch.float32)
            else:
                sharding = engine_of()
                sharding.prepare(root, run_on((copies, dist.get_world_size() // copies), "bf16-true"))
                upcast = sharding.upcast
        assert upcast.keys() == dict(root.named_parameters()).keys()
        assert all(p.dtype == torch.float32 for p in root.parameters())
        seen.append(live)
    return seen[0].peak, seen[1].peak, seen[1].now()


def _both(copies: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    return _peaks(), _fp32_peaks(copies)


@pytest.mark.parametrize(("world", "copies"), sampled([(2, 1), (4, 1), (4, 2)], 0))
def test_a_rank_holds_its_shards_and_one_unit(world: int, copies: int) -> None:
    model = DEPTH * UNIT_BYTES
    for (full, peak, after), (fp32, fp32_peak, fp32_after) in run_distributed(_both, world, copies):
        # The counting sees a full model, and a full fp32 one, if there is one.
        assert full >= model <= fp32
        # Both dims divide evenly, so shards have no padding. A scalar or two may be left.
        assert 0 <= after - model // world <= 64
        # While the last unit is sharded: all shards, that unit, and the check's mask of a byte per element.
        assert peak <= model // world + 1.5 * UNIT_BYTES
        assert peak < 0.7 * model
        # Masters are made of shards, and never a byte of another rank's.
        assert fp32_peak == fp32_after == model * copies // world
