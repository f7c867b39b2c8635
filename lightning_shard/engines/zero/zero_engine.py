"""DeepSpeed as an engine: ZeRO stages 1 to 3, with offload to the host or to files."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard import devices
from lightning_shard.engines import module_checks, optimizer_remap, unsharding
from lightning_shard.engines.engine import Engine, PlannedRun, Run
from lightning_shard.engines.external_writes import ExternalWriteCheck, ForeignStepCheck
from lightning_shard.engines.memory_breakdown import Resident, module_tensors, unsharded
from lightning_shard.engines.memory_model import EngineFacts, deepspeed_facts, plain_settings
from lightning_shard.engines.optimizer_probe import rests_at_zero
from lightning_shard.engines.owner_steps import needs_of
from lightning_shard.engines.parameter_use import TRAINING, ParameterUse
from lightning_shard.engines.torch_ddp import prepare_replica
from lightning_shard.engines.transforms import ForwardOptions, find_transforms
from lightning_shard.engines.zero import flat_layout, offload
from lightning_shard.engines.zero.config.building import deepspeed_config
from lightning_shard.engines.zero.config.fields import planned_facts, run_facts
from lightning_shard.engines.zero.config.zero_settings import ZeroSettings, check_optimizers, check_policy
from lightning_shard.engines.zero.connection import Connection, synced_generation
from lightning_shard.engines.zero.running_engine import RunningEngine, replaced_step, replay_cpu_adam, start_engine
from lightning_shard.engines.zero.scalars import ScalarLeaves
from lightning_shard.engines.zero.stepping import OneOptimizerSteps, ParameterCarrier, SeveralOptimizerSteps
from lightning_shard.engines.zero.unused_parameters import UnusedParameters
from lightning_shard.engines.zero.values import ParameterValues, partition_module
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import SHARD, MeshConfig, resolve_mesh
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors import masters
from lightning_shard.tensors.flat import AnyOptimizer, LiveTensor
from lightning_shard.tensors.names import named_parameters, parameter_names
from lightning_shard.tensors.tracing import version


class ZeroEngine(Engine):
    """See `Engine`. `attach_optimizers` hands a fit's parameters to DeepSpeed. Evaluation needs it in stage 3 alone."""

    name = "deepspeed"
    strategy = "ShardDeepSpeedStrategy"
    replicates = False
    follows_freezing = False
    steps_itself = True
    shows_gradients = False

    _stepping: OneOptimizerSteps | SeveralOptimizerSteps

    def __init__(
        self,
        settings: ZeroSettings,
        forward: ForwardOptions,
        *,
        mesh: MeshConfig,
        connection: Connection | None = None,
    ) -> None:
        self._settings = settings
        self._forward_options = forward
        self._mesh = mesh
        self._connection = connection
        self._stage = settings.stage
        self.gathers_in_forward = self._stage == 3
        self._running: RunningEngine | None = None
        self._writes: ExternalWriteCheck | None = None
        self._master_versions: list[int] = []  # Autograd's version counters after the engine's last write.
        self._optimizers: Sequence[Optimizer] = ()
        self.upcast: Mapping[str, torch.dtype] = {}
        self._config: dict[str, Any] = {}
        self._called = f"{self.strategy}(stage={self._stage})"
        self._failed, self._closing = False, ExitStack()

    def check(self, run: PlannedRun) -> None:
        replicas, _ = resolve_mesh(self._mesh, world_size=run.ranks, processes_per_node=run.per_node)
        if replicas > 1:
            raise ConfigurationError(
                f"mesh asks for {replicas} replicas, but DeepSpeed shards over all processes. Use shard_fsdp_hybrid, "
                "or remove replicate."
            )
        check_policy(self._settings, run)

    def policy(self, base: PrecisionPolicy, *, loss_scale_given: bool) -> PrecisionPolicy:
        communicated = self._settings.communication_data_type
        policy = base if communicated is None else replace(base, reduce=DTYPES[communicated])
        loss_scale = self._settings.loss_scaling
        if policy.loss_scale is None or loss_scale is None or loss_scale_given:
            return policy
        return replace(policy, loss_scale=loss_scale)

    def memory_model(self, module: nn.Module, run: PlannedRun) -> EngineFacts:
        # DeepSpeed's own, once a run has begun.
        config = self._config or deepspeed_config(self._settings, planned_facts(module, run))
        return deepspeed_facts(config, ranks=run.ranks, accumulate=run.policy.accumulate, device_type=run.device_type)

    def resolved_config(self) -> Mapping[str, Any]:
        return plain_settings(self._settings.fields, self._forward_options, mesh=self._mesh)

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        self._module, self._run = module, run
        unsharding.unguard_module(module)
        optimizer_remap.remember_parameters(module)
        module_checks.refuse_sharded(module, self._called, by_zero=self._stage < 3)
        if run.fitting:
            module_checks.refuse_double(module, self._called, run.policy.compute)
            module_checks.refuse_kinds(module, self._called, hooked=self._stage == 3)
        if self._stage < 3:
            prepare_replica(module, device=run.device, seed=run.seed)
        else:
            module_checks.refuse_compiled(module, self._called)
            module_checks.refuse_lists(module, self._called)
            self._closing.callback(unsharding.guard_module, module)
        self._closing.callback(self._to_host)
        if run.fitting and self._settings.optimizer_device != "none":
            devices.step_on_all_cores(run.device, run.planned.per_node, os.environ, says=run.mesh.get_rank() == 0)
        transforms, policy = find_transforms(module, self.units(module), self._forward_options), run.policy
        if policy.compute != torch.float32:
            # Before activation checkpointing, which has to repeat the casts in backward.
            self._closing.callback(install_casts(module, policy.compute, output=policy.output, float8=policy.float8))
        for undo in transforms():
            self._closing.callback(undo)
        self._values = ParameterValues(module)
        self._closing.callback(self._values.restore_rounded)
        if not run.fitting:
            if self._stage == 3:
                config = deepspeed_config(self._settings, run_facts(module, run, []))
                self._prepare_config({k: v for k, v in config.items() if k not in ("optimizer", "scheduler")}, None)
                self._partition_module([])
                self._start_engine(None)
            else:
                self._values.round_parameters(policy.compute)
            self._closing.callback(masters.register_masters(self._module, self))
        return module

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        optimizer_remap.remap_optimizers(optimizers, self._module)
        check_optimizers(self._settings, optimizers)
        self._optimizers = optimizers
        self._foreign_steps = ForeignStepCheck(self._module, optimizers)
        self._closing.callback(self._foreign_steps.remove_hooks)
        several = len(optimizers) > 1
        # Several step full parameters in any case. `needs_of` refuses an optimizer that couples them.
        self._needs = {id(each): needs_of(each, self._run) for each in optimizers}
        full = any(n.full or n.loss for n in self._needs.values()) and not several
        for each in optimizers:
            if self.needs(each).again:
                raise ConfigurationError(
                    f"{type(each).__qualname__} needs a closure that computes the loss again, but DeepSpeed steps "
                    "after backward, without one. Use shard_ddp, or another optimizer."
                )
        optimizer: Optimizer | None = ParameterCarrier(optimizers) if several else next(iter(optimizers), None)
        rests = full or {rests_at_zero(each) for each in optimizers} == {True}
        facts = run_facts(self._module, self._run, optimizers, count_steps=self._settings.counts_steps)
        self._prepare_config(deepspeed_config(self._settings, facts), optimizer)
        master, loaded = self._run.policy.master, self._values.loaded
        self.upcast = {n: p.dtype for n, p in self._trainable.items() if p.dtype != master and n not in loaded}
        if self._stage == 3:
            # A carrier has groups of its own.
            self._partition_module(optimizers if optimizer is None else [*optimizers, optimizer])
        else:
            self._values.cast_parameters(self._run.policy.compute)
        whole_step = None
        if full and optimizer is not None:
            if self._settings.optimizer_device == "nvme":
                raise ConfigurationError(
                    f"{type(optimizer).__qualname__} needs full parameters, but with the optimizer offloaded to NVMe "
                    "DeepSpeed swaps state of flat shards alone. Use device: cpu, or an elementwise optimizer."
                )
            # DeepSpeed's call of it does nothing: the new values are written before DeepSpeed casts and gathers them.
            whole_step = optimizer.step
            self._closing.enter_context(replaced_step(optimizer))
        running = self._start_engine(optimizer)
        unused = self._watch_use(running, several=several, rests=rests)
        places: dict[str, Any] = {"group": self._run.mesh[SHARD].get_group(), "device": self._run.device}
        parts = self._module, running, self._values, unused
        if several:
            self._stepping = SeveralOptimizerSteps(*parts, optimizers=optimizers, **places)
        else:
            assert running.optimizer is not None
            self._optimizers = [running.optimizer]
            self._stepping = OneOptimizerSteps(*parts, whole_step=whole_step, **places)
        self._closing.callback(self._stepping.closing.close)
        self._writes = self._values.start_write_check(running, self._called)
        self._closing.callback(self._writes.end_check)
        self._note_written()
        self._closing.callback(module_checks.refuse_new_groups(self._optimizers, self._called))
        self._closing.callback(masters.register_masters(self._module, self))
        return list(self._optimizers), running.scheduler

    def replicas(self) -> dist.ProcessGroup | None:
        return None

    @property
    def _trainable(self) -> dict[str, nn.Parameter]:
        named = named_parameters(self._module)
        return {fqn: p for fqn, p in named.items() if p.requires_grad and p.is_floating_point()}

    def _watch_use(self, running: RunningEngine, *, several: bool, rests: bool) -> UnusedParameters:
        """Compare the parameters that steps use. ``rests``: see `UnusedParameters`."""
        apart, automatic = flat_layout.names_in_leaf_modules(self._module), self._run.automatic
        leaves: Mapping[str, Tensor] = running.scalars.leaves if running.scalars else {}
        self._use.compare_parameters(self._trainable, always=several, always_reduced=apart)
        for fqn, parameter in self._trainable.items():
            ordered = self._stage > 1 and automatic
            self._closing.callback(self._use.watch_parameter(fqn, leaves.get(fqn, parameter), ordered=ordered))
        unused = UnusedParameters(self._use, running, rests=rests, apart=apart, automatic=automatic)
        self._closing.callback(unused.closing.close)
        return unused

    def _prepare_config(self, config: dict[str, Any], optimizer: Optimizer | None) -> None:
        run = self._run
        self._config, folders = offload.prepare_run_config(config, optimizer, policy=run.policy, device=run.device)
        self._closing.callback(offload.remove_run_folders, folders)

    def _partition_module(self, optimizers: Sequence[Optimizer]) -> None:
        """Shard the parameters, one submodule at a time. ``optimizers`` follow those that replace meta ones."""
        if self._connection is not None and not self._config["zero_optimization"].get("memory_efficient_linear", True):
            # A zero.Init of the user's in configure_model has replaced them.
            self._connection.restore_functions()
        run = self._run
        loaded = partition_module(
            self._module, device=run.device, compute=run.policy.compute, seed=run.seed, config=self._config
        )
        # An earlier run's masters win.
        self._values.loaded = {**loaded, **self._values.loaded}
        optimizer_remap.remap_optimizers(optimizers, self._module)

    def _start_engine(self, optimizer: Optimizer | None) -> RunningEngine:
        self._running = running = start_engine(
            self._module,
            optimizer=optimizer,
            config=self._config,
            names=parameter_names(self._module),
            device=self._run.device,
            foresees_steps=self._run.foresees_steps,
        )
        self._closing.callback(self._stop_engine)
        units = flat_layout.gathered_modules(self._module) if self.gathers_in_forward else []
        self._use = ParameterUse(units, self._module.named_modules() if units else ())
        self._closing.callback(self._use.remove_hooks)
        self._values.write_masters(running, ranks=Ranks.of())
        lasting, run = self._values.live_tensors(running), self._run
        scalars = ScalarLeaves(self._module, lasting, running.groups, policy=run.policy, device=run.device)
        running.scalars = scalars if scalars.leaves else None
        return running

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_writes(together=True)
        with self._foreign_steps.watch_forward():
            output = self._run_forward(TRAINING, step, *args, **kwargs)
        if self._writes is not None and self.gathers_in_forward:
            self._writes.refuse_writes(together=True)
        return output

    def _check_writes(self, *, together: bool) -> None:
        """Follow an optimizer's writes outside of its step. Refuse a user's, ``together`` on all ranks."""
        # Stage 3 gathers and frees parameters in forward.
        if self._writes is None or (self.gathers_in_forward and self._started.inside):
            return
        if self._master_versions != self._versions_of_masters():
            self._started.refresh_parameters()
            self._note_written()
        self._writes.refuse_writes(together=together)

    def _versions_of_masters(self) -> list[int]:
        return [version(group.flat) for group in self._started.groups]

    def _note_written(self) -> None:
        if self._writes is not None:
            self._master_versions = self._versions_of_masters()
            self._writes.accept_own_writes()

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_writes(together=False)
        if self._running is None:
            return step(*args, **kwargs)
        if not self.gathers_in_forward:
            return self._run_forward("evaluation", step, *args, **kwargs)
        with synced_generation(self._config):
            output = self._run_forward("evaluation", step, *args, **kwargs)
        # Gradients taken inside of the forward left parameters gathered, and no backward follows.
        self._running.offload.release_backward_leftovers()
        return output

    def _run_forward(self, kind: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with module_checks.explain_ungathered(self._called), self._use.watch_forward(kind):
            return self._started.run_forward(step, *args, **kwargs)

    @property
    def _started(self) -> RunningEngine:
        assert self._running is not None, "DeepSpeed's engine is started by attach_optimizers"
        return self._running

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        self._stepping.check_backward()
        self._use.used_in_pass.clear()
        with module_checks.explain_ungathered(self._called):
            self._started.run_backward(loss, call if overridden else None, **kwargs)
        self._stepping.unused.after_backward()

    def sync_gradients(self, enabled: bool) -> None:
        self._started.set_boundary(enabled)

    def finish_gradients(self) -> None:
        self._stepping.collect_gradients()

    def reduction_dtypes(self) -> set[torch.dtype]:
        return flat_layout.reduction_dtypes(self._started.engine)

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        self._check_writes(together=True)
        self._stepping.step_optimizer(optimizer, skip=skip, **kwargs)
        self._note_written()
        if self._writes is not None:
            self._writes.end_step()

    def before_saving(self) -> None:
        if self._run.fitting:
            self._stepping.share_state()

    def free_gradients(self) -> None:
        """Do nothing: DeepSpeed drops gradients in its step."""

    def follow_freezing(self) -> nn.Module:
        raise ConfigurationError(
            "Parameters were frozen or thawed after the fit began, but DeepSpeed steps those that were trainable then. "
            "Freeze before the fit, or use shard_fsdp."
        )

    def reshard_and_sync_masters(self) -> None:
        self._check_writes(together=False)

    def begin_writing(self) -> None:
        self._master_versions = []  # All ranks count the masters as written until `refresh_model_weights`.

    def refresh_model_weights(self) -> None:
        self._values.refresh_module(self._running, device=self._run.device)
        self._note_written()

    def resumed(self) -> None:
        if self._running is not None and self._running.optimizer is not None:
            replay_cpu_adam(self._running.optimizer, self._running.groups)

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        return {"deepspeed_config": self._config}

    def release_module(self, *, failed: bool) -> None:
        """Take DeepSpeed off. Full parameters get their masters' values. Sharded ones stay for another run."""
        self._failed = failed
        # In reverse order of preparation.
        self._closing.close()

    def _stop_engine(self) -> None:
        self._writes = None
        # The live tensors stay, so that a checkpoint can be saved after the fit too.
        self._values.give_back(self._started, device=self._run.device, communicate=not self._failed)
        self._started.stop()

    def _to_host(self) -> None:
        if self._stage < 3 and not self._failed:
            self._module.cpu()

    @property
    def _flat(self) -> OneOptimizerSteps | SeveralOptimizerSteps | None:
        """The flat tensors of a fit, or None in an evaluation."""
        return self._stepping if self._running is not None and self._running.groups else None

    def masters(self) -> Mapping[str, LiveTensor]:
        return self._values.live_tensors(self._running)

    def optimizers(self) -> Sequence[AnyOptimizer]:
        return self._optimizers if self._flat is None else self._flat.optimizers()

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        return self._stepping.stepped_parameters(optimizer)

    def gradient(self, fqn: str, parameter: Tensor) -> LiveTensor | None:
        return parameter.grad if self._flat is None else self._flat.gradient(fqn, parameter)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], DeviceMesh | None]:
        return self._stepping.gradients(optimizer), self._run.mesh

    def accumulated(self) -> Mapping[str, LiveTensor]:
        return {} if self._flat is None else self._flat.accumulated()

    def memory_breakdown(self) -> Iterable[Resident]:
        if self._flat is not None:
            return self._flat.memory_breakdown()
        return module_tensors(self._module, self._optimizers, device=self._run.device)

    def unsharded(self) -> Iterable[Resident]:
        return unsharded(self._module) if self._flat is None else self._flat.unsharded()
