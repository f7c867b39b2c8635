"""Lightning's adapter of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_shard import _lightning
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines import ddp
from lightning_shard.engines.transforms import Checkpointing, checkpointed_modules, compiled_modules, transform
from lightning_shard.engines.zero import partition, process
from lightning_shard.engines.zero import running as zero
from lightning_shard.engines.zero.config import (
    DeepSpeedFields,
    OptimizerOffload,
    ParameterOffload,
    Stage3Options,
    ZeroBuckets,
    ZeroPlusPlus,
    check_fields,
    check_policy,
    deepspeed_config,
    effective,
    loss_scaling_from,
)
from lightning_shard.engines.zero.values import Values
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.strategies import deepspeed_checks as checks
from lightning_shard.strategies import deepspeed_offload as offload
from lightning_shard.strategies.base import AccumulateSync
from lightning_shard.strategies.cut_modules import refuse_cut_by_fsdp, refuse_cut_by_zero
from lightning_shard.strategies.deepspeed_facts import asks_for_steps, run_facts
from lightning_shard.strategies.deepspeed_stepping import SteppingStrategy
from lightning_shard.strategies.precision import ShardPrecision
from lightning_shard.tensors import masters


class ShardDeepSpeedStrategy(SteppingStrategy):
    """ZeRO stages 0 to 3 on DeepSpeed's engine, with offload to the host or to NVMe, on CPU and on CUDA."""

    engine = "deepspeed"

    def __init__(
        self,
        *,
        aligned: bool = False,
        stage: Literal[0, 1, 2, 3] | None = None,
        offload_optimizer: OptimizerOffload | None = None,
        offload_parameters: ParameterOffload | None = None,
        buckets: ZeroBuckets | None = None,
        stage3: Stage3Options | None = None,
        zero_plus_plus: ZeroPlusPlus | None = None,
        communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None,
        config: str | dict[str, Any] | None = None,
        activation_checkpointing: Checkpointing = None,
        compile: bool = False,
        mesh: MeshConfig | None = None,
        accumulate_sync: AccumulateSync = "auto",
        log_grad_norm: bool = False,
        error_if_nonfinite: bool = False,
        timeout_seconds: float = 1800.0,
        init_timeout_seconds: float = 300.0,
        lost_rank_seconds: float | None = 120.0,
        preemption: PreemptionConfig | None = None,
        async_save: bool = False,
        process_group_backend: str | None = None,
    ) -> None:
        """Set up DeepSpeed.

        Args:
            aligned: hold the precision contract: fp32 masters that begin as the unrounded loaded values, optimizer
                state, reduction and accumulation whatever the Trainer's precision says.
            stage: what is cut over the processes: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
                Default: what ``config`` says, and else 2.
            offload_optimizer: keep optimizer state and masters on the host or on NVMe, and step on the host.
            offload_parameters: keep parameters on the host or on NVMe; stage 3 only.
            buckets: sizes and forms of the collectives.
            stage3: when stage 3 gathers parameters and when it frees them.
            zero_plus_plus: less traffic for stage 3, at the cost of memory (hpZ) or of digits.
            communication_data_type: dtype in which gradients cross the network; default: the precision policy's.
            config: a whole DeepSpeed configuration, as the path of a JSON file or as a mapping; the arguments above
                are laid over it. "auto" takes a value from the Trainer, the optimizer or the model.
            activation_checkpointing: recompute forward in backward: "units" for every repeated block, n for every n-th,
                or a list of class names; "selective" for every block but its matrix products, convolutions and
                attention (without dropout), which are kept.
            compile: compile every repeated block's forward with ``torch.compile``; what it can't compile runs as it
                is, with a warning. Not in stage 3, which gathers inside of the blocks.
            mesh: DeepSpeed cuts over all processes; an axis ``replicate`` other than 1 is refused.
            accumulate_sync: when gradients are reduced under ``accumulate_grad_batches``, which the stage decides:
                once at the "boundary" in stages 0 and 1, after each "micro_batch" in 2 and 3. "auto" is that.
            log_grad_norm: log ``grad_norm`` also when ``gradient_clip_val`` does not need it.
            error_if_nonfinite: raise when clipping finds a norm of inf or NaN, instead of scaling by it.
            timeout_seconds: how long a collective waits before the run fails.
            init_timeout_seconds: how long a rank may be late at the beginning before the others fail.
            lost_rank_seconds: how long a rank may give no sign of life before the others end with a message that
                names it; null: they wait for ``timeout_seconds``.
            preemption: what a fit does when it is told to stop by a signal or a time limit.
            async_save: let training go on while a checkpoint is written, once this rank's part is copied to the host,
                which takes memory for that one copy. A write that fails is raised at the next batch.
            process_group_backend: "nccl", "gloo", ...; default: by device.

        Raises:
            ConfigurationError: a value that can't work, before anything is touched.
        """
        self._fields = DeepSpeedFields(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            buckets=buckets or ZeroBuckets(),
            stage3=stage3 or Stage3Options(),
            zero_plus_plus=zero_plus_plus or ZeroPlusPlus(),
            communication_data_type=communication_data_type,
            config=config,
        )
        process.require_tested_version()
        check_fields(self._fields, aligned)
        self._stage = effective(self._fields).stage
        checks.refuse_compiling(compile, self._stage)
        super().__init__(
            mesh=mesh or MeshConfig(),
            aligned=aligned,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            accumulate_sync=checks.accumulation(accumulate_sync, self._stage),
            log_grad_norm=log_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            timeout_seconds=timeout_seconds,
            init_timeout_seconds=init_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            preemption=preemption,
            async_save=async_save,
            process_group_backend=process_group_backend,
        )
        self._running = None
        self._config = {}
        self._folders: list[Path] = []
        self._values = None
        self._failed = False
        self._ended = False
        self._listed = []
        self._connection: process.Connection | None = None
        self._undo: list[Callable[[], None]] = []
        self._in_step = False

    # Precision

    def _policy_of(self, plugin: ShardPrecision) -> PrecisionPolicy:
        policy = super()._policy_of(plugin)
        communicated = effective(self._fields).communication_data_type
        if communicated is not None:
            policy = replace(policy, reduce=DTYPES[communicated])
        given = loss_scaling_from(self._fields.config)
        if policy.loss_scale is None or given is None or plugin.sets_loss_scale:
            return policy
        return replace(policy, loss_scale=given)

    def _check_configuration(self) -> None:
        super()._check_configuration()
        self.check_precision()

    def check_precision(self) -> None:
        """See the parent's."""
        check_policy(self._fields, self.policy, self.aligned)
        checks.refuse_16_bits(self._stage, self.policy.compute, self.precision_plugin.precision)

    def _mesh_shape(self) -> tuple[int, int]:
        replicas, pieces = super()._mesh_shape()
        checks.refuse_replicas(replicas)
        return replicas, pieces

    # Set-up

    def setup_environment(self) -> None:
        """Connect the processes, and DeepSpeed to them. All ranks call it."""
        super().setup_environment()
        self._connection = process.connect(
            self.root_device,
            backend=torch.distributed.get_backend(),
            local_size=self.num_processes,
        )

    def _prepare_module(self, module: LightningModule, *, fitting: bool) -> nn.Module:
        refuse_cut_by_fsdp(module, type(self).__name__)
        if self._stage < 3:
            refuse_cut_by_zero(module, f"{type(self).__name__}(stage={self._stage})")
            ddp.prepare_whole(module, device=self.root_device, seed=self._agreed_seed())
        if fitting:
            offload.warn_of_lock()
        self._undo = self._add_transforms(module)
        self._running, self._ended, self._failed = None, False, False
        self._values = Values(module)
        if not fitting and self._stage == 3:
            config = deepspeed_config(self._fields, run_facts(self, module.trainer))
            # Evaluation steps nothing.
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
            self._config, self._folders = offload.prepare(self, config, None)
            self._cut(module, self._values)
            self._running = zero.start(module, optimizer=None, config=self._config, names={})
            self._values.share(self._running, rank=self.global_rank, size=self.world_size)
        elif not fitting and self.policy.compute != torch.float32:
            self._values.round(self.policy.compute)
        if not fitting:
            self._stand_in(module)
        return module

    def _add_transforms(self, module: LightningModule) -> list[Callable[[], None]]:
        units = self.find_units(module)
        checkpointed = checkpointed_modules(module, units, self.activation_checkpointing)
        compiled = compiled_modules(units, self.compile)
        undo = []
        # First, so that what checkpointing runs again in backward has the casts in it.
        if self.policy.compute != torch.float32:
            undo.append(install_casts(module, self.policy.compute, output=self.policy.output))
        return undo + transform(checkpointed, self.activation_checkpointing, compiled)

    def _engage(self, trainer: Trainer) -> None:
        module, values = self.lightning_module, self._values
        assert module is not None
        assert values is not None
        optimizer = checks.only_optimizer(self.optimizers, self._fields)
        if optimizer is None:
            # What stands there in its place is not a fact about the run.
            self.optimizers = []
        facts = run_facts(self, trainer, count_steps=asks_for_steps(self._fields))
        config = deepspeed_config(self._fields, facts)
        self._config, self._folders = offload.prepare(self, config, optimizer)
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._warn_upcast({n: p.dtype for n, p in trainable if p.dtype != self.policy.master and n not in values.kept})
        if self._stage == 3:
            self._cut(module, values)
            _lightning.count_sharded_parameters(self._replacements, trainer)
        else:
            values.keep(self.policy.compute)
        names: dict[Tensor, str] = {parameter: fqn for fqn, parameter in module.named_parameters()}
        self._running = zero.start(module, optimizer=optimizer, config=self._config, names=names)
        assert self._running.optimizer is not None
        self._listed = list(module.parameters())
        self.optimizers = [self._running.optimizer]
        if self._running.scheduler is not None:
            self.lr_scheduler_configs.append(_lightning.step_scheduler(self._running.scheduler))
        values.share(self._running, rank=self.global_rank, size=self.world_size)
        self._stand_in(module)

    def _stand_in(self, module: LightningModule) -> None:
        """Let who fills the module's parameters find what is stepped in their place."""
        masters.register(module, masters.Masters(tensors=self._model_tensors, publish=self._after_reading_tensors))

    def _cut(self, module: LightningModule, values: Values) -> None:
        if self._connection is not None and not self._config["zero_optimization"].get("memory_efficient_linear", True):
            # A zero.Init of the user's in configure_model has replaced them.
            self._connection.restore_functions()
        kept, made = partition.cut(
            module,
            device=self.root_device,
            compute=self.policy.compute,
            seed=self._agreed_seed(),
            config=self._config,
        )
        values.keep_cut(kept)
        partition.replace_parameters(self.optimizers, made)

    def _gathers_in_forward(self) -> bool:
        return self._stage == 3

    # End

    def on_exception(self, exception: BaseException) -> None:
        """Communicate no more: other ranks may be anywhere."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Take DeepSpeed off the module and give the process back as it was.

        Parameters that are whole get their masters' values; cut ones stay cut, and another run with stage 3 goes on
        with them.
        """
        self._stop_ledger()
        module = self.lightning_module
        if module is not None:
            masters.forget(module)
        if self._running is not None and self._values is not None and not self._ended:
            self._values.leave(self._running, device=self.root_device, communicate=not self._failed)
            # What it stepped stays, so that a checkpoint can be saved after the fit too.
            zero.stop(self._running)
            self._ended = True
        offload.clean_up(self, self._folders)
        if self._values is not None:
            self._values.unround()
        while self._undo:
            self._undo.pop()()
        self._release()
        if module is not None and self._stage < 3 and not self._failed:
            module.cpu()
        if self._connection is not None:
            self._connection.undo()
            self._connection = None
