"""Lightning's adapter of DeepSpeed."""

from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from lightning.pytorch import Trainer
from torch import nn
from typing_extensions import override

from lightning_shard.arguments import Given, converted
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.zero import connection
from lightning_shard.engines.zero.config import fields
from lightning_shard.engines.zero.config.reading import read_config
from lightning_shard.engines.zero.config.zero_settings import RULE, read_settings
from lightning_shard.engines.zero.zero_engine import ZeroEngine
from lightning_shard.errors import ConfigurationError, raise_problems
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.words import DType
from lightning_shard.strategies.settings import AccumulateSync, CommonArguments, CommonSettings, with_common_arguments
from lightning_shard.strategies.strategy import ShardStrategy


class ShardDeepSpeedStrategy(ShardStrategy):
    """ZeRO stages 1 to 3 on DeepSpeed's engine, with offload to the host or to NVMe, on CPU and on CUDA."""

    @with_common_arguments
    def __init__(
        self,
        *,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: Given[fields.OptimizerOffload] | None = None,
        offload_parameters: Given[fields.ParameterOffload] | None = None,
        buckets: Given[fields.ZeroBuckets] | None = None,
        stage3: Given[fields.Stage3Options] | None = None,
        zero_plus_plus: Given[fields.ZeroPlusPlus] | None = None,
        communication_data_type: DType | None = None,
        config: str | dict[str, Any] | None = None,
        mesh: Given[MeshConfig] | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Set up DeepSpeed.

        Args:
            stage: 1 shards optimizer state over the processes, 2 also gradients, 3 also parameters. 0 shards nothing
                and is refused: use ``shard_deepspeed_stage_0``. Default: from ``config``, else 2.
            offload_optimizer: keep optimizer state and masters on the host or on NVMe, and step on the host.
            offload_parameters: keep parameters on the host or on NVMe. Stage 3 only.
            buckets: sizes and forms of the collectives.
            stage3: when stage 3 gathers parameters and when it frees them.
            zero_plus_plus: less traffic for stage 3, at the cost of memory (hpZ) or of digits.
            communication_data_type: dtype in which gradients cross the network. Default: the precision policy's.
            config: a whole DeepSpeed configuration, as the path of a JSON file or as a mapping. The arguments above
                override it. "auto" takes a value from the Trainer, the optimizer or the model.
            mesh: DeepSpeed shards over all processes. A ``replicate`` axis other than 1 is refused.

        Raises:
            ConfigurationError: a value that can't work, before anything is touched.
        """
        connection.refuse_older_version()
        given = fields.DeepSpeedFields(
            stage=stage,
            offload_optimizer=converted(offload_optimizer),
            offload_parameters=converted(offload_parameters),
            buckets=converted(buckets) or fields.ZeroBuckets(),
            stage3=converted(stage3) or fields.Stage3Options(),
            zero_plus_plus=converted(zero_plus_plus) or fields.ZeroPlusPlus(),
            communication_data_type=communication_data_type,
            # Read once: a file that is edited or deleted during the run changes nothing.
            config=read_config(config),
        )
        settings = CommonSettings(mesh=converted(mesh) or MeshConfig(), **common)
        problems: list[str] = []
        self._asked = read_settings(given, aligned=settings.aligned, problems=problems)
        raise_problems(problems, RULE)
        stage_number = self._asked.stage
        if stage_number == 0:
            raise ConfigurationError(
                "stage is 0, which shards nothing and is the DDP engine here. Use strategy: shard_deepspeed_stage_0, "
                "or ShardDDPStrategy, or stage: 1."
            )
        if settings.compile and stage_number == 3:
            raise ConfigurationError(
                "compile is true with stage 3, but there DeepSpeed gathers parameters in hooks inside of each block, "
                "and a graph ends at every one. Use shard_fsdp, whose hooks are outside of its units, stage 2, or "
                "compile: false."
            )
        super().__init__(replace(settings, accumulate_sync=_accumulation(settings.accumulate_sync, stage_number)))
        self._connection: connection.Connection | None = None

    @override
    def engine_for(self, module: nn.Module | None = None, *, plain: bool = False) -> Engine:
        settings, forward = self._asked, self._settings.forward
        if plain:
            own = fields.DeepSpeedFields(config={"zero_optimization": {"stage": settings.stage}})
            settings, forward = read_settings(own, aligned=self.aligned, problems=[]), ForwardOptions()
        return ZeroEngine(settings, forward, mesh=self._settings.mesh, connection=self._connection)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """Full configuration of DeepSpeed, "auto" resolved. Empty before a run. Checkpoints have it too."""
        return {} if self._engine is None else dict(self._engine.checkpoint_metadata()["deepspeed_config"])

    @override
    def setup_environment(self) -> None:
        """Connect the processes, and DeepSpeed to them. All ranks call it."""
        super().setup_environment()
        backend = torch.distributed.get_backend()
        self._connection = connection.connect_deepspeed(
            self.root_device,
            backend=backend,
            local_rank=self.local_rank,
            local_size=self.num_processes,
            timeout=self.timeout,
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.lr_scheduler_configs and "scheduler" in self._asked.merged:
            own = type(self.lr_scheduler_configs[0].scheduler).__name__
            raise ConfigurationError(
                f"configure_optimizers returns the schedule {own}, and the DeepSpeed configuration has the section "
                "scheduler, but the learning rate follows one. Remove one of the two."
            )

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


def _accumulation(asked: AccumulateSync, stage: int) -> AccumulateSync:
    """When a stage reduces accumulated gradients. ConfigurationError: ``asked`` differs from it."""
    own: AccumulateSync = "boundary" if stage < 2 else "micro_batch"
    if asked not in ("auto", own):
        raise ConfigurationError(
            f"accumulate_sync is {asked!r}, but ZeRO stage {stage} reduces accumulated gradients "
            f"{'at the boundary' if own == 'boundary' else 'after each micro-batch'}. Use accumulate_sync: auto."
        )
    return own
