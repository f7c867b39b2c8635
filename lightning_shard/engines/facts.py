"""Engines as plain numbers: what bytes, traffic and advice are computed from, before a run and in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a run holds its states."""

    engine: str
    """"ddp", "fsdp" or "deepspeed"."""

    ranks: int
    """All ranks of the run."""

    pieces: int
    """Over how many ranks what is cut is cut."""

    cut: frozenset[str]
    """Kinds of which a rank has a piece."""

    on_host: frozenset[str] = frozenset()
    """Kinds that are offloaded."""

    checkpointing: bool = False
    """Whether activations are recomputed."""

    aligned: bool = False


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Every rank holds everything: ``ShardDDPStrategy``."""

    ranks: int
    composable: bool = True
    """Whether FSDP2's machinery replicates, and not torch's DistributedDataParallel."""

    gradients_in_buckets: bool = False
    """``gradient_as_bucket_view`` of torch's DDP."""

    at_boundary: bool = True
    """Whether accumulated gradients are reduced once (``accumulate_sync``), and not after each micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """FSDP2: ``ShardFSDPStrategy``."""

    replicate: int
    """Copies of the model."""

    shard: int
    """Pieces of a copy."""

    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    backward_prefetch: int = 0
    at_boundary: bool = False
    """Whether accumulated gradients are reduced once, and so wait whole."""

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.replicate * self.shard


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed: ``ShardDeepSpeedStrategy``. Sizes are elements, as in DeepSpeed's configuration."""

    ranks: int
    stage: int
    optimizer: Offload = "none"
    """Where optimizer state and masters wait; "none": on the device."""

    parameters: Offload = "none"
    """Where parameter shards wait; "none": on the device."""

    reduce_bucket: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    accumulate: torch.dtype = torch.float32
    """Dtype in which gradients are summed."""

    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    model_persistence_threshold: int | None = None
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    optimizer_buffers: int = 4
    parameter_buffers: int = 5
    parameter_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    hpz: int = 1
    on_host: bool = False
    """Whether the device is the host's CPU, which uses what waits in host memory where it lies."""

    @property
    def uses_shards(self) -> bool:
        """Whether forward sees stage 3's shards themselves: of one process, they are whole."""
        return self.ranks == 1 and (self.parameters == "none" or self.on_host)


EngineFacts = Replicas | Shards | Zero


def zero_from(config: Mapping[str, Any], *, ranks: int, accumulate: torch.dtype, device_type: str = "cuda") -> Zero:
    """The settings that matter for bytes, from a whole DeepSpeed configuration (`deepspeed_config`).

    Args:
        config: with "auto" resolved; DeepSpeed's defaults hold for what it does not say.
        ranks: processes.
        accumulate: the policy's.
        device_type: "cuda" or "cpu".
    """
    zero = config["zero_optimization"]
    stage = int(zero["stage"])
    optimizer, parameters = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    known: dict[str, Any] = {
        "reduce_bucket": zero.get("reduce_bucket_size"),
        "overlap_comm": zero.get("overlap_comm", stage == 3),
        "contiguous_gradients": zero.get("contiguous_gradients"),
        "prefetch_bucket": zero.get("stage3_prefetch_bucket_size"),
        "persistence_threshold": zero.get("stage3_param_persistence_threshold"),
        "model_persistence_threshold": zero.get("stage3_model_persistence_threshold"),
        "max_live": zero.get("stage3_max_live_parameters"),
        "max_reuse_distance": zero.get("stage3_max_reuse_distance"),
        "sub_group": zero.get("sub_group_size"),
        "optimizer": optimizer.get("device"),
        "optimizer_buffers": optimizer.get("buffer_count"),
        "parameters": parameters.get("device"),
        "parameter_buffers": parameters.get("buffer_count"),
        "parameter_buffer_size": parameters.get("buffer_size"),
        "max_in_cpu": parameters.get("max_in_cpu"),
        "hpz": zero.get("zero_hpz_partition_size"),
    }
    given = {key: value for key, value in known.items() if value is not None}
    return Zero(ranks=ranks, stage=stage, accumulate=accumulate, on_host=device_type == "cpu", **given)
