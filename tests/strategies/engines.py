"""The engines whose numbers are compared, what they are compared by, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_shard.engines.zero.config.fields import OptimizerOffload, ParameterOffload, ZeroPlusPlus
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from lightning_shard.strategies.strategy import ShardStrategy
from tests.models import VOCAB

BATCH = 4
# Below the norms and the largest elements of the gradients of all steps, which `check` asserts.
NORM_LIMIT, VALUE_LIMIT = 0.05, 0.002
HOST = OptimizerOffload(device="cpu")
DEEPSPEED = partial(ShardDeepSpeedStrategy, hooks_use_accessor=True)  # The hooks of these tests do.
ENGINES: dict[str, Callable[..., ShardStrategy]] = {
    "ddp": ShardDDPStrategy,
    "full": ShardFSDPStrategy,
    "grad_op": lambda **kwargs: ShardFSDPStrategy(reshard_after_forward=False, **kwargs),
    "full_ignoring": lambda **kwargs: ShardFSDPStrategy(ignored_modules=["Ignored"], **kwargs),
    "hybrid_1x2": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate=1, shard=2), **kwargs),
    "hybrid_2x1": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate=2, shard=1), **kwargs),
    "offload": lambda **kwargs: ShardFSDPStrategy(cpu_offload=True, **kwargs),
    "hybrid_2x2": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate=2, shard=2), **kwargs),
    **{f"zero_{stage}": partial(DEEPSPEED, stage=stage) for stage in (1, 2, 3)},
    **{f"zero_{s}_offload": partial(DEEPSPEED, stage=s, offload_optimizer=HOST) for s in (1, 2)},
    "zero_3_offload_optimizer": partial(DEEPSPEED, stage=3, offload_optimizer=HOST),
    "zero_3_offload": partial(
        DEEPSPEED, stage=3, offload_optimizer=HOST, offload_parameters=ParameterOffload(device="cpu")
    ),
    "zero_3_hpz": partial(DEEPSPEED, stage=3, zero_plus_plus=ZeroPlusPlus(hpz_partition_size=2)),
    "ddp_plain": lambda **kwargs: ShardDDPStrategy(**{**kwargs, "aligned": False}),
}
ZERO = [name for name in ENGINES if name.startswith("zero")]
OFFLOADED = ["zero_1_offload", "zero_2_offload", "zero_3_offload_optimizer", "zero_3_offload"]
AT_2 = ["ddp", "full", "grad_op", "hybrid_1x2", "hybrid_2x1", "offload"]
AT_4 = ["full", "grad_op", "hybrid_2x2", "offload", "ddp", "zero_2", "zero_3", "zero_3_hpz"]


class Mapped(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens whose targets are a fixed permutation of them: no two samples are equal, and it can be learnt."""

    def __init__(self, count: int = 512) -> None:
        self.tokens = torch.randint(0, VOCAB, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], (self.tokens[index] * 5 + 3) % VOCAB


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor that is not bitwise equal."""
    assert one.keys() == other.keys()
    return {n: (one[n] - other[n]).abs().max().item() for n in one if not torch.equal(one[n], other[n])}


def relative(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference of any tensor's elements, in units of that tensor's largest element."""
    return max((d / one[name].abs().max().item() for name, d in differences(one, other).items()), default=0.0)


NORM = {"gradient_clip_val": NORM_LIMIT}
VALUE = {"gradient_clip_val": VALUE_LIMIT, "gradient_clip_algorithm": "value"}
TWICE = {"accumulate_grad_batches": 2}
BOUNDARY = {"accumulate_sync": "boundary"}
