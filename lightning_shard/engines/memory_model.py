"""Engines as plain numbers, from which bytes, traffic and advice are computed, and settings as plain values, which
ranks, manifests and later runs compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal

import torch

Offload = Literal["none", "cpu", "nvme"]

_NONE: frozenset[str] = frozenset()
_STEPPED = frozenset({"masters", "optimizer"})
_GRADIENTS = _STEPPED | {"gradients"}
STATES = _GRADIENTS | {"parameters"}
"""The kinds of `lightning_shard.memory.KINDS` that an engine may shard or offload."""

# Strategy names to try when memory runs out, with the kinds that each shards over all ranks and offloads to the host.
_Advised = Mapping[str, tuple[frozenset[str], frozenset[str]]]


class _OfTorch:
    """Common to torch's engines."""

    advised: ClassVar[_Advised] = {"shard_fsdp": (STATES, _NONE), "shard_fsdp_offload": (STATES, STATES)}
    overlaps: ClassVar[bool] = True  # Whether gradients are reduced during backward.
    own_cpu_optimizer: ClassVar[bool] = False  # Whether offloaded steps use kernels of the engine, not torch's.


@dataclass(frozen=True, kw_only=True)
class TorchDDPFacts(_OfTorch):
    """torch's DistributedDataParallel."""

    sharded: ClassVar[frozenset[str]] = _NONE  # The kinds in `STATES` that are sharded.
    shards: ClassVar[int] = 1  # The number of ranks they are sharded over.

    ranks: int
    gradient_as_bucket_view: bool = False
    # Whether accumulated gradients are reduced once (``accumulate_sync``), not after each micro-batch.
    reduce_at_boundary: bool = True

    @property
    def communicators(self) -> int:
        """The number of process groups with collectives."""
        return int(self.ranks > 1)


@dataclass(frozen=True, kw_only=True)
class FSDPFacts(_OfTorch):
    """FSDP2 on a mesh of ``replicate`` x ``shard`` processes. torch's ``replicate`` has one shard."""

    sharded: ClassVar[frozenset[str]] = STATES - {"masters"}

    replicate: int  # Copies of the model.
    shard: int  # Ranks of one copy.
    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    backward_prefetch: int = 0
    reduce_at_boundary: bool = False  # Whether accumulated gradients wait unsharded and are reduced once.

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        return self.shard

    @property
    def communicators(self) -> int:
        return (self.shard > 1) + (self.replicate > 1)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFacts:
    """DeepSpeed ZeRO. Fields have the names of its configuration's keys without ``stage3_``. Sizes are in elements."""

    advised: ClassVar[_Advised] = {
        "shard_deepspeed_stage_1": (_STEPPED, _NONE),
        "shard_deepspeed_stage_2": (_GRADIENTS, _NONE),
        "shard_deepspeed_stage_3": (STATES, _NONE),
        "shard_deepspeed_stage_2_offload": (_GRADIENTS, _GRADIENTS),
        "shard_deepspeed_stage_3_offload": (STATES, STATES),
    }
    own_cpu_optimizer: ClassVar[bool] = True

    ranks: int
    stage: int
    accumulate: torch.dtype = torch.float32  # Dtype in which gradients are summed.
    optimizer_device: Offload = "none"  # The memory of master weights, optimizer state and their gradients.
    param_device: Offload = "none"  # The memory of parameter shards.
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int | None = None
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    zero_hpz_partition_size: int = 1
    optimizer_buffer_count: int = 4
    param_buffer_count: int = 5
    param_buffer_size: int = 100_000_000
    param_max_in_cpu: int = 1_000_000_000
    device_is_cpu: bool = False  # True: forward computes on offloaded parameters without a copy.

    @property
    def sharded(self) -> frozenset[str]:
        """Each stage shards one more kind."""
        kinds = ["masters", "optimizer", "gradients", "parameters"]
        return frozenset(kinds[: self.stage + 1])

    @property
    def shards(self) -> int:
        return self.ranks

    @property
    def communicators(self) -> int:
        return (self.ranks > 1) * (1 + (self.zero_hpz_partition_size > 1))

    @property
    def overlaps(self) -> bool:
        return self.overlap_comm

    @property
    def reduce_at_boundary(self) -> bool:
        return self.stage < 2

    @property
    def forward_uses_shards(self) -> bool:
        """Whether forward reads stage 3's shards without a gather: with one process a shard is the full parameter."""
        return self.ranks == 1 and (self.param_device == "none" or self.device_is_cpu)


EngineFacts = TorchDDPFacts | FSDPFacts | DeepSpeedFacts


def deepspeed_facts(config: Mapping[str, Any], ranks: int, accumulate: torch.dtype, device_type: str) -> DeepSpeedFacts:
    """The settings that matter for bytes, from `deepspeed_config` with "auto" resolved, or DeepSpeed's defaults."""
    zero = config["zero_optimization"]
    stage = int(zero["stage"])
    said = {"overlap_comm": stage == 3, **{key.removeprefix("stage3_"): value for key, value in zero.items()}}
    for short, section in (("optimizer", "offload_optimizer"), ("param", "offload_param")):
        said |= {f"{short}_{key}": value for key, value in (zero.get(section) or {}).items()}
    read = DeepSpeedFacts.__dataclass_fields__.keys() - {"ranks", "stage", "accumulate", "device_is_cpu"}
    given: dict[str, Any] = {key: value for key, value in said.items() if key in read and value is not None}
    return DeepSpeedFacts(ranks=ranks, stage=stage, accumulate=accumulate, device_is_cpu=device_type == "cpu", **given)


def plain_settings(*options: Any, **more: Any) -> dict[str, Any]:
    """The fields of option dataclasses and ``more`` settings, by name, as `plain` values."""
    found = {f.name: plain(getattr(o, f.name)) for o in options for f in fields(o)}
    return {**found, **{name: plain(value) for name, value in more.items()}}


def plain(value: Any) -> Any:
    """``value`` in JSON's types, the same on every rank: functions become their import path, objects their class."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
