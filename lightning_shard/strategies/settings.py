"""The constructor arguments that all strategies have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines.transforms import Checkpointing, ForwardOptions
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.run.processes import ProcessOptions
from lightning_shard.strategies.precision import ClipOptions

AccumulateSync = Literal["auto", "boundary", "micro_batch"]


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Their values; each strategy's constructor says what they mean."""

    mesh: MeshConfig
    aligned: bool
    activation_checkpointing: Checkpointing
    compile: bool
    accumulate_sync: AccumulateSync
    log_grad_norm: bool
    error_if_nonfinite: bool
    timeout_seconds: float
    init_timeout_seconds: float
    lost_rank_seconds: float | None
    preemption: PreemptionConfig
    async_save: bool
    process_group_backend: str | None

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if self.lost_rank_seconds is not None and self.lost_rank_seconds <= 0:
            raise ConfigurationError(
                f"lost_rank_seconds is {self.lost_rank_seconds}, but must be greater than 0, or null."
            )
        if self.accumulate_sync not in ("auto", "boundary", "micro_batch"):
            raise ConfigurationError(
                f"accumulate_sync is {self.accumulate_sync!r}, but must be 'auto', 'boundary' or 'micro_batch'."
            )

    @property
    def at_boundary(self) -> bool:
        """Whether accumulated gradients are reduced once, at the accumulation boundary."""
        return self.accumulate_sync == "boundary"

    @property
    def forward(self) -> ForwardOptions:
        """What changes the units' forward."""
        return ForwardOptions(activation_checkpointing=self.activation_checkpointing, compile=self.compile)

    @property
    def processes(self) -> ProcessOptions:
        """What concerns the processes."""
        return ProcessOptions(
            mesh=self.mesh,
            timeout_seconds=self.timeout_seconds,
            init_timeout_seconds=self.init_timeout_seconds,
            process_group_backend=self.process_group_backend,
        )

    @property
    def clip(self) -> ClipOptions:
        """What concerns clipping."""
        return ClipOptions(log_grad_norm=self.log_grad_norm, error_if_nonfinite=self.error_if_nonfinite)
