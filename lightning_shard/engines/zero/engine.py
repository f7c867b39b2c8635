"""DeepSpeed as an engine: ZeRO stages 1 to 3, with offload to the host or to files."""

import os
from collections.abc import Callable, Mapping, Sequence
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
from lightning_shard.engines.engine import Engine, EngineTensors, PlannedRun, Run
from lightning_shard.engines.external_writes import ExternalWriteCheck, ForeignStepCheck
from lightning_shard.engines.memory_model import EngineFacts, deepspeed_facts, plain_settings
from lightning_shard.engines.optimizer_probe import rests_at_zero
from lightning_shard.engines.parameter_use import TRAINING, ParameterUse
from lightning_shard.engines.torch_ddp import prepare_replica
from lightning_shard.engines.torch_optimizer_engine import ModuleTensors
from lightning_shard.engines.transforms import ForwardOptions, find_transforms
from lightning_shard.engines.whole_steps import WholeSteps, needs_of
from lightning_shard.engines.zero import layout, offload, process, running
from lightning_shard.engines.zero.config.building import deepspeed_config
from lightning_shard.engines.zero.config.fields import planned_facts, run_facts
from lightning_shard.engines.zero.config.settings import ZeroSettings, check_optimizers, check_policy
from lightning_shard.engines.zero.running import Running
from lightning_shard.engines.zero.scalars import Scalars
from lightning_shard.engines.zero.stepping import Carrier, OneOptimizer, SeveralOptimizers, Stepping, UnusedParameters
from lightning_shard.engines.zero.values import Values, partition
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import SHARD, MeshConfig, resolve_mesh
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors import masters
from lightning_shard.tensors.names import named_parameters, parameter_names
from lightning_shard.tensors.tracing import version


class Zero(Engine):
    """See `Engine`. A fit begins with a plain module. `attach_optimizers` hands its parameters to DeepSpeed together
    with the optimizer. Evaluation needs DeepSpeed in stage 3 alone.
    """

    name = "deepspeed"
    strategy = "ShardDeepSpeedStrategy"
    replicates = False
    follows_freezing = False
    steps_itself = True
    shows_gradients = False

    _stepping: Stepping

    def __init__(
        self,
        settings: ZeroSettings,
        forward: ForwardOptions,
        *,
        mesh: MeshConfig,
        connection: process.Connection | None = None,
    ) -> None:
        """``connection`` is DeepSpeed's to the process group, once there is one."""
        self._settings = settings
        self._forward_options = forward
        self._mesh = mesh
        self._connection = connection
        self._stage = settings.stage
        self.gathers_in_forward = self._stage == 3
        self._running: Running | None = None
        self._writes: ExternalWriteCheck | None = None
        self._masters_written: list[int] = []  # How often each master was, by the engine.
        self._unused: UnusedParameters | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self.upcast: Mapping[str, torch.dtype] = {}
        self._config: dict[str, Any] = {}
        self._called = f"{self.strategy}(stage={self._stage})"
        self._failed = False
        self._closing = ExitStack()

    def check(self, run: PlannedRun) -> None:
        replicas, _ = resolve_mesh(self._mesh, world_size=run.ranks, processes_per_node=run.per_node)
        if replicas > 1:
            raise ConfigurationError(
                f"mesh asks for {replicas} replicas, but DeepSpeed shards over all processes: its MiCS, which "
                "replicated over nodes, was removed, and hpZ (zero_plus_plus.hpz_partition_size) replicates parameters "
                "alone. Use shard_fsdp_hybrid, or remove replicate."
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
        # Of a run that goes on, what DeepSpeed was given.
        config = self._config or deepspeed_config(self._settings, planned_facts(module, run))
        return deepspeed_facts(config, ranks=run.ranks, accumulate=run.policy.accumulate, device_type=run.device_type)

    def resolved_config(self) -> Mapping[str, Any]:
        return plain_settings(self._settings.fields, self._forward_options, mesh=self._mesh)

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        self._module, self._run = module, run
        unsharding.unguard(module)
        optimizer_remap.remember(module)
        module_checks.refuse_sharded(module, self._called, by_zero=self._stage < 3)
        if run.fitting:
            module_checks.refuse_double(module, self._called, run.policy.compute)
            module_checks.refuse_kinds(module, self._called, hooked=self._stage == 3)
        if self._stage < 3:
            prepare_replica(module, device=run.device, seed=run.seed)
        else:
            module_checks.refuse_compiled(module, self._called)
            module_checks.refuse_lists(module, self._called)
            self._closing.callback(unsharding.guard, module)
        self._closing.callback(self._to_host)
        if run.fitting:
            offload.warn_of_lock()
        if run.fitting and self._settings.optimizer_device != "none":
            devices.step_on_all_cores(run.device, run.planned.per_node, os.environ, says=run.mesh.get_rank() == 0)
        transforms, policy = find_transforms(module, self.units(module), self._forward_options), run.policy
        if policy.compute != torch.float32:
            # First, so that what checkpointing runs again in backward has the casts in it.
            self._closing.callback(install_casts(module, policy.compute, output=policy.output, float8=policy.float8))
        for undo in transforms():
            self._closing.callback(undo)
        self._values = Values(module)
        self._closing.callback(self._values.unround)
        if not run.fitting:
            if self._stage == 3:
                self._start_evaluation()
            else:
                self._values.round(policy.compute)
            self._closing.callback(masters.register(self._module, self))
        return module

    def _start_evaluation(self) -> None:
        config = deepspeed_config(self._settings, run_facts(self._module, self._run, []))
        # Evaluation has no optimizer.
        self._configure({key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}, None)
        self._partition([])
        self._start(None)

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        optimizer_remap.follow(optimizers, self._module)
        check_optimizers(self._settings, optimizers)
        self._optimizers = optimizers
        self._foreign_steps = ForeignStepCheck(self._module, optimizers)
        self._closing.callback(self._foreign_steps.close)
        several = len(optimizers) > 1
        # Several step full parameters in any case; what couples these is refused.
        self._needs = {id(each): needs_of(each, self._run) for each in optimizers}
        full = any(n.full or n.loss for n in self._needs.values()) and not several
        for each in optimizers:
            self._refuse_closure(each)
        optimizer: Optimizer | None = Carrier(optimizers) if several else next(iter(optimizers), None)
        rests = full or {rests_at_zero(each) for each in optimizers} == {True}
        facts = run_facts(self._module, self._run, optimizers, count_steps=self._settings.counts_steps)
        self._configure(deepspeed_config(self._settings, facts), optimizer)
        master, loaded = self._run.policy.master, self._values.loaded
        self.upcast = {n: p.dtype for n, p in self._trainable.items() if p.dtype != master and n not in loaded}
        if self._stage == 3:
            # A carrier has groups of its own.
            self._partition(optimizers if optimizer is None else [*optimizers, optimizer])
        else:
            self._values.cast(self._run.policy.compute)
        step = self._take_over_step(optimizer) if full and optimizer is not None else None
        running = self._start(optimizer)
        self._stepping = self._begin_stepping(running, step, rests=rests)
        self._closing.callback(self._stepping.close)
        self._writes = self._values.check_writes(running, self._called)
        self._closing.callback(self._writes.close)
        self._note_written()
        self._closing.callback(module_checks.refuse_new_groups(self._optimizers, self._called))
        self._closing.callback(masters.register(self._module, self))
        return list(self._optimizers), running.scheduler

    def replicas(self) -> dist.ProcessGroup | None:
        return None

    def _refuse_closure(self, optimizer: Optimizer) -> None:
        if self.needs(optimizer).again:
            raise ConfigurationError(
                f"{type(optimizer).__qualname__} needs a closure that computes the loss again, but DeepSpeed steps "
                "after backward, without one. Use shard_ddp, or another optimizer."
            )

    @property
    def _trainable(self) -> dict[str, nn.Parameter]:
        named = named_parameters(self._module)
        return {fqn: p for fqn, p in named.items() if p.requires_grad and p.is_floating_point()}

    def _begin_stepping(self, running: Running, step: Callable[..., Any] | None, *, rests: bool) -> Stepping:
        """``step`` is that of an optimizer on full parameters; ``rests``: see `UnusedParameters`."""
        assert running.optimizer is not None
        shards = layout.steps(running.zero, running.groups)
        several, apart, automatic = len(self._optimizers) > 1, layout.in_leaf_modules(self._module), self._run.automatic
        leaves: Mapping[str, Tensor] = running.scalars.leaves if running.scalars else {}
        self._use.compare(self._trainable, always=several, apart=apart)
        for fqn, parameter in self._trainable.items():
            ordered = self._stage > 1 and automatic
            self._closing.callback(self._use.watch(fqn, leaves.get(fqn, parameter), ordered=ordered))
        unused = UnusedParameters(self._use, running, rests=rests, apart=apart, repeats=automatic)
        self._unused = unused
        self._closing.callback(unused.close)
        group, device = self._run.mesh[SHARD].get_group(), self._run.device
        if several:
            of, taken = self._optimizers, unused.taken
            return SeveralOptimizers(self._module, running, self._values, of, taken=taken, group=group, device=device)
        shards = [unused.with_gradients(shard) for shard in shards]
        self._optimizers, own = [running.optimizer], running.optimizer
        whole = None if step is None else WholeSteps(own, shards, step=step, group=group, device=device)
        return OneOptimizer(self._module, running, self._values, whole, device=device)

    def _take_over_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Let DeepSpeed step nothing by itself; returns the optimizer's own step."""
        if self._settings.optimizer_device == "nvme":
            raise ConfigurationError(
                f"{type(optimizer).__qualname__} needs full parameters, but with the optimizer offloaded to NVMe "
                "DeepSpeed swaps state of flat shards alone. Use offload_optimizer with device: cpu, or an elementwise "
                "optimizer."
            )
        step = optimizer.step
        # The values are there before DeepSpeed casts and gathers them.
        self._closing.enter_context(running.replaced_step(optimizer))
        return step

    def _configure(self, config: dict[str, Any], optimizer: Optimizer | None) -> None:
        run = self._run
        self._config, folders = offload.prepare(config, optimizer, policy=run.policy, device=run.device)
        self._closing.callback(offload.clean_up, folders)

    def _partition(self, optimizers: Sequence[Optimizer]) -> None:
        """Shard the parameters, one submodule at a time; ``optimizers`` step those that take the place of meta ones."""
        if self._connection is not None and not self._config["zero_optimization"].get("memory_efficient_linear", True):
            # A zero.Init of the user's in configure_model has replaced them.
            self._connection.restore_functions()
        run = self._run
        loaded = partition(
            self._module, device=run.device, compute=run.policy.compute, seed=run.seed, config=self._config
        )
        # An earlier run's masters win.
        self._values.loaded = {**loaded, **self._values.loaded}
        optimizer_remap.follow(optimizers, self._module)

    def _start(self, optimizer: Optimizer | None) -> Running:
        self._running = running.start(
            self._module,
            optimizer=optimizer,
            config=self._config,
            names=parameter_names(self._module),
            device=self._run.device,
            foresees_steps=self._run.foresees_steps,
        )
        self._closing.callback(self._stop)
        units = layout.gathered_modules(self._module) if self.gathers_in_forward else []
        self._use = ParameterUse(units, self._module.named_modules() if units else ())
        self._closing.callback(self._use.close)
        self._values.start(self._running, ranks=Ranks.of())
        lasting, groups = self._values.tensors(self._running), self._running.groups
        self._running.scalars = Scalars(self._module, lasting, groups, policy=self._run.policy, device=self._run.device)
        return self._running

    @property
    def tensors(self) -> EngineTensors:
        if self._running is not None and self._running.groups:
            return self._stepping
        live = self._values.tensors(self._running)
        return ModuleTensors(module=self._module, stepping=self._optimizers, device=self._run.device, live=live)

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._settle_writes(together=True)
        with self._foreign_steps.forward():
            output = self._inside(TRAINING, step, *args, **kwargs)
        if self._writes is not None and self.gathers_in_forward:
            self._writes.refuse_writes(together=True)
        return output

    def _settle_writes(self, *, together: bool) -> None:
        """Follow the optimizer's writes to masters outside of its step, as ScheduleFree has values for training and for
        evaluation; refuse the user's to parameters, ``together`` on all ranks.
        """
        # Inside of a step of stage 3 parameters are gathered and freed.
        if self._writes is None or (self.gathers_in_forward and self._started.inside):
            return
        if self._masters_written != self._master_versions():
            running.refresh(self._started)
            self._note_written()
        self._writes.refuse_writes(together=together)

    def _master_versions(self) -> list[int]:
        return [version(group.flat) for group in self._started.groups]

    def _note_written(self) -> None:
        if self._writes is not None:
            self._masters_written = self._master_versions()
            self._writes.note_versions()

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._settle_writes(together=False)
        if self._running is None:
            return step(*args, **kwargs)
        if not self.gathers_in_forward:
            return self._inside("evaluation", step, *args, **kwargs)
        with process.generates_together(self._config):
            output = self._inside("evaluation", step, *args, **kwargs)
        running.release(self._running)
        return output

    def _inside(self, kind: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with module_checks.explained(self._called), self._use.step(kind):
            return running.run(self._started, step, *args, **kwargs)

    @property
    def _started(self) -> Running:
        assert self._running is not None, "DeepSpeed's engine is started by attach_optimizers"
        return self._running

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        self._stepping.check_backward()
        self._use.came.clear()
        with module_checks.explained(self._called):
            running.backward(self._started, loss, call if overridden else None, **kwargs)
        if self._unused is not None and self._run.automatic:
            self._unused.after_micro_batch()

    def sync_gradients(self, enabled: bool) -> None:
        running.set_boundary(self._started, enabled)

    def finish_gradients(self) -> None:
        self._stepping.collect()
        if self._run.automatic:
            self._finish_step()

    def _finish_step(self) -> None:
        if self._unused is not None and len(self._optimizers) == 1:
            self._unused.finish()

    def reduction_dtypes(self) -> set[torch.dtype]:
        return layout.reduction_dtypes(self._started.engine)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], DeviceMesh | None]:
        return self.tensors.gradients(optimizer), self._run.mesh

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        self._settle_writes(together=True)
        if not self._run.automatic:
            # Each backward pass is over a part of the model.
            self._finish_step()
        self._stepping.step(optimizer, skip=skip, **kwargs)
        self._note_written()
        if self._writes is not None:
            self._writes.end_step()

    def before_saving(self) -> None:
        if self._run.fitting:
            self._stepping.share_state()

    def free_gradients(self) -> None:
        """Nothing: DeepSpeed drops them in its step."""

    def follow_freezing(self) -> nn.Module:
        raise ConfigurationError(
            "Parameters were frozen or thawed after the fit began, but DeepSpeed steps those that were trainable then. "
            "Freeze before the fit, or use shard_fsdp."
        )

    def reshard_and_sync_masters(self) -> None:
        self._settle_writes(together=False)

    def begin_writing(self) -> None:
        self._masters_written = []  # Until `refresh_model_weights` all ranks take the masters for changed.

    def refresh_model_weights(self) -> None:
        self._values.show(self._running, device=self._run.device)
        self._note_written()

    def resumed(self) -> None:
        if self._running is not None and self._running.optimizer is not None:
            running.replay_cpu_adam(self._running.optimizer, self._running.groups)

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        return {"deepspeed_config": self._config}

    def release_module(self, *, failed: bool) -> None:
        """Take DeepSpeed off: full parameters get their masters' values; sharded ones stay for another run."""
        self._failed = failed
        # What was prepared so far, in reverse order.
        self._closing.close()

    def _stop(self) -> None:
        self._writes = None
        # What it stepped stays, so that a checkpoint can be saved after the fit too.
        self._values.leave(self._started, device=self._run.device, communicate=not self._failed)
        running.stop(self._started)

    def _to_host(self) -> None:
        if self._stage < 3 and not self._failed:
            self._module.cpu()
