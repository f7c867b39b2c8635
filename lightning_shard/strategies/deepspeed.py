"""Lightning's adapter of DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from lightning_shard import _lightning
from lightning_shard.checkpoint import stand_ins
from lightning_shard.checkpoint.flat_shard import FlatTensor
from lightning_shard.checkpoint.stepped import AnyOptimizer, FlatOptimizer
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines import ddp, transforms
from lightning_shard.engines.deepspeed_config import (
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
    read_config,
)
from lightning_shard.engines.holdings import Held
from lightning_shard.engines.whole import LiveTensor
from lightning_shard.engines.zero import cpu_adam, cutting, gradients, holdings, process
from lightning_shard.engines.zero import engine as zero
from lightning_shard.engines.zero.values import Values
from lightning_shard.errors import ConfigurationError, PrecisionError
from lightning_shard.mesh import MeshConfig
from lightning_shard.meters.advice import Sharding
from lightning_shard.planning.facts import Engine, zero_from
from lightning_shard.plugins.precision import ShardPrecision
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.strategies import deepspeed_offload as offload
from lightning_shard.strategies.base import AccumulateSync, ShardStrategy
from lightning_shard.strategies.cut_modules import refuse_cut_by_fsdp, refuse_cut_by_zero
from lightning_shard.strategies.deepspeed_facts import asks_for_steps, run_facts
from lightning_shard.wrapping import find_units


class ShardDeepSpeedStrategy(ShardStrategy):
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
        activation_checkpointing: Literal["units"] | int | list[str] | None = None,
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
                or a list of class names.
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
        super().__init__(
            mesh=mesh or MeshConfig(),
            aligned=aligned,
            accumulate_sync=self._accumulation(accumulate_sync),
            log_grad_norm=log_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            timeout_seconds=timeout_seconds,
            init_timeout_seconds=init_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            preemption=preemption,
            async_save=async_save,
            process_group_backend=process_group_backend,
        )
        self._running: zero.ZeroEngine | None = None
        self._activation_checkpointing = activation_checkpointing
        self._config: dict[str, Any] = {}
        self._folders: list[Path] = []
        self._values: Values | None = None
        self._failed = False
        self._ended = False
        self._listed: list[Tensor] = []
        self._connection: process.Connection | None = None
        self._undo: list[Callable[[], None]] = []
        self._in_step = False

    def _accumulation(self, asked: AccumulateSync) -> AccumulateSync:
        own: AccumulateSync = "boundary" if self._stage < 2 else "micro_batch"
        if asked in ("boundary", "micro_batch") and asked != own:
            stages = "0 and 1" if asked == "boundary" else "2 and 3"
            raise ConfigurationError(
                f"accumulate_sync is {asked!r}, but ZeRO stage {self._stage} reduces accumulated gradients "
                f"{'at the boundary' if own == 'boundary' else 'after each micro-batch'}. Use stages {stages}, or "
                "accumulate_sync: auto."
            )
        return own if asked == "auto" else asked

    # Precision

    def _engine_steps(self) -> dict[str, Any]:
        return {"step": self._engine_step, "backward": self._engine_backward}

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
        self._check_precision()

    def _check_precision(self) -> None:
        check_policy(self._fields, self.policy, self.aligned)
        if self._stage == 0 and self.policy.compute != torch.float32:
            raise PrecisionError(
                f"precision is {self.precision_plugin.precision!r} with DeepSpeed stage 0, which sums and reduces "
                "gradients in 16 bits there. Use shard_ddp, which replicates everything as well and runs every "
                "precision, or '32-true'."
            )

    def _mesh_shape(self) -> tuple[int, int]:
        replicas, pieces = super()._mesh_shape()
        if replicas > 1:
            raise ConfigurationError(
                f"mesh asks for {replicas} replicas, but DeepSpeed cuts over all processes: its MiCS, which copied "
                "shards over nodes, was removed, and hpZ (zero_plus_plus.hpz_partition_size) only keeps a second copy "
                "of the parameters. Use shard_fsdp_hybrid, or remove replicate."
            )
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
        checkpointed = transforms.checkpointed_modules(
            module, find_units(module, "auto", with_children=False), self._activation_checkpointing
        )
        undo = []
        # First, so that what checkpointing runs again in backward has the casts in it.
        if self.policy.compute != torch.float32:
            undo.append(install_casts(module, self.policy.compute, output=self.policy.output))
        return undo + [transforms.checkpoint_forward(part) for part in checkpointed]

    def _engage(self, trainer: Trainer) -> None:
        module, values = self.lightning_module, self._values
        assert module is not None
        assert values is not None
        optimizer = self._only_optimizer()
        facts = run_facts(self, trainer, count_steps=asks_for_steps(self._fields))
        config = deepspeed_config(self._fields, facts)
        self._config, self._folders = offload.prepare(self, config, optimizer)
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._warn_upcast({n: p.dtype for n, p in trainable if p.dtype != self.policy.master and n not in values.kept})
        if self._stage == 3:
            self._cut(module, values)
            _lightning.count_cut_parameters(trainer)
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
        stand_ins.install(module, stand_ins.StandIns(tensors=self._model_tensors, show=self._after_reading_tensors))

    def _only_optimizer(self) -> Optimizer | None:
        """The optimizer that configure_optimizers made; None: the configuration describes one."""
        if len(self.optimizers) > 1:
            raise ConfigurationError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers, but DeepSpeed's engine steps one. "
                "Return one, with parameter groups where settings differ, or use shard_fsdp."
            )
        if isinstance(self.optimizers[0], LBFGS):
            raise ConfigurationError(
                "configure_optimizers returns LBFGS, which evaluates the loss several times in a step, but DeepSpeed's "
                "engine steps without a closure. Use another optimizer, or shard_ddp."
            )
        if not _lightning.is_missing_optimizer(self.optimizers[0]):
            return self.optimizers[0]
        if "optimizer" not in read_config(self._fields.config):
            raise ConfigurationError(
                "configure_optimizers returns none, and the DeepSpeed configuration has no optimizer section. Return "
                "an optimizer, or write the section: optimizer: {type: AdamW, params: {lr: 1.0e-4}}."
            )
        # Not a fact about the run.
        self.optimizers = []
        return None

    def _cut(self, module: LightningModule, values: Values) -> None:
        if self._connection is not None and not self._config["zero_optimization"].get("memory_efficient_linear", True):
            # A zero.Init of the user's in configure_model has replaced them.
            self._connection.restore_functions()
        kept, made = cutting.cut(
            module,
            device=self.root_device,
            compute=self.policy.compute,
            seed=self._agreed_seed(),
            config=self._config,
        )
        values.keep_cut(kept)
        cutting.replace_parameters(self.optimizers, made)

    def _gathers_in_forward(self) -> bool:
        return self._stage == 3

    # Steps

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running is None:
            return super()._run(step, *args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training and not self.lightning_module.automatic_optimization:
            # Which of the step's backward passes is the last is known when the optimizer steps.
            zero.set_boundary(self._running, False)
        self._in_step = True
        try:
            return zero.run(self._running, step, *args, **kwargs)
        finally:
            self._in_step = False

    def _engine_backward(self, loss: Tensor, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        assert self._running is not None
        if is_overridden("backward", module):
            module.backward(loss, *args, **kwargs)
            self._running.pending = True
        else:
            zero.backward(self._running, loss, inside_forward=self._in_step, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Tell DeepSpeed that this micro-batch is not the last of an accumulation."""
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def _set_gradient_sync(self, enabled: bool) -> None:
        if self._running is not None:
            zero.set_boundary(self._running, enabled)

    def _finish_gradients(self) -> None:
        assert self.lightning_module is not None
        if self._running is not None and not self.lightning_module.automatic_optimization:
            with self._watching_collectives():
                zero.finish_accumulation(self._running)

    def _engine_step(self, optimizer: Optimizer) -> None:
        assert self._running is not None
        zero.step(self._running, skip=self.precision_plugin.step_skipped)

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        assert self._running is not None
        if self._stage == 0:
            return super()._gradients(optimizer)
        return gradients.reduced(self._running.zero) if self._running.pending else []

    @property
    def _gradient_pieces(self) -> DeviceMesh | None:
        return None if self._stage == 0 else self.device_mesh

    def _stepped(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]] | None:
        if self._running is None or self._stage == 0:
            return None
        return [
            (member.fqn, group.flat) for group in self._running.groups for member in group.members if member.stepped
        ]

    def _live_gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        if self._running is None or self._stage == 0:
            return super()._live_gradient(fqn, parameter)
        return gradients.of_parameter(self._running.zero, self._running.groups, fqn) if self._running.pending else None

    def _held_gradients(self) -> Iterable[tuple[str, Tensor]]:
        assert self.lightning_module is not None
        if self._running is None or self._stage == 0:
            return super()._held_gradients()
        names: dict[Tensor, str] = {p: n for n, p in self.lightning_module.named_parameters() if p.requires_grad}
        return gradients.held(self._running.zero, names)

    def _follow_freezing(self) -> None:
        raise ConfigurationError(
            "Parameters were frozen or thawed after the fit began, but DeepSpeed steps those that were trainable then. "
            "Freeze before the fit, or use shard_fsdp."
        )

    def held_tensors(self) -> Iterable[Held]:
        """See the parent's; with masters, buckets and staging buffers, and tensors in files."""
        if self._running is None or self._values is None or not self._running.groups:
            return super().held_tensors()
        kept = self._values.shares
        return holdings.zero_tensors(
            self._running.zero, self._metered(), device=self.root_device, parameters=self._listed, kept=kept
        )

    def _planned_engine(self) -> Engine:
        return zero_from(self._config, ranks=self.world_size, accumulate=self.policy.accumulate)

    def sharding(self) -> Sharding:
        """See the parent's; each stage cuts one kind more."""
        asked = effective(self._fields)
        kinds = ["masters", "optimizer", "gradients", "parameters"]
        stepping = kinds[:3] if asked.optimizer_device != "none" else []
        parameters = kinds[3:] if asked.parameter_device != "none" else []
        return replace(
            super().sharding(),
            pieces=self.world_size,
            cut=frozenset(kinds[: self._stage + 1] if self._stage else []),
            on_host=frozenset(stepping + parameters),
            checkpointing=self._activation_checkpointing is not None,
        )

    def gathered_tensors(self) -> Iterable[Held]:
        """See the parent's."""
        return holdings.gathered(self._listed)

    # Checkpoints

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The whole configuration that DeepSpeed was given, "auto" resolved; empty before a run. It is saved too."""
        return self._config

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save DeepSpeed's configuration, for people to read, with what the parent's saves."""
        super().save_checkpoint({**checkpoint, "deepspeed_config": self._config}, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """FQN, tied ones too, to this rank's live tensor: masters where there are any, whole or a flat piece."""
        own = super().lightning_module_state_dict()
        return {**own, **self._model_tensors()}

    def _optimizer_states(self) -> Sequence[AnyOptimizer]:
        if self._running is None or self._stage == 0:
            return super()._optimizer_states()
        return [FlatOptimizer(optimizer=self.optimizers[0], groups=self._running.groups)]

    def _model_tensors(self) -> Mapping[str, Tensor | FlatTensor]:
        return {} if self._values is None else self._values.tensors(self._running)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the tensors, and let the optimizer go on from the step that they are of; see the parent's."""
        super().load_model_state_dict(checkpoint, strict)
        if self._running is not None and self._running.optimizer is not None:
            cpu_adam.replay(self._running.optimizer, self._running.groups)

    def _after_reading_tensors(self) -> None:
        assert self._values is not None
        self._values.show(self._running, device=self.root_device)

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
            stand_ins.remove(module)
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
