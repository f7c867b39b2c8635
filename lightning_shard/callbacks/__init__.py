"""Callbacks for users to add to a Trainer."""

from lightning_shard.callbacks.batch_size import BatchSizeCallback
from lightning_shard.callbacks.ema import EMACallback
from lightning_shard.callbacks.memory_report import MemoryCallback
from lightning_shard.callbacks.pretrained import PretrainedWeights
from lightning_shard.callbacks.profiler import ProfilerCallback
from lightning_shard.callbacks.run_page import RunPageCallback
from lightning_shard.callbacks.throughput import ThroughputCallback

__all__ = [
    "BatchSizeCallback",
    "EMACallback",
    "MemoryCallback",
    "PretrainedWeights",
    "ProfilerCallback",
    "RunPageCallback",
    "ThroughputCallback",
]
