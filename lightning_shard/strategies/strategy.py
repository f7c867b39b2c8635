"""Base of the strategies: Lightning's hooks, each a list of calls to the parts of a run in order."""

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard import run as parts
from lightning_shard._lightning import Replacements, callbacks, loops, messages, processes, results
from lightning_shard._lightning.optimizers import hold_schedulers, is_missing_optimizer, step_scheduler, update_wrappers
from lightning_shard.callbacks.ema import evaluates_average
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.cluster.slurm_job import check_launch, read_job
from lightning_shard.engines import self_check
from lightning_shard.engines.engine import Engine, PlannedRun, Run
from lightning_shard.engines.memory_model import plain_settings
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.engines.unsharding import unshard_module
from lightning_shard.mesh import data_parallel_coordinates, resolve_mesh
from lightning_shard.precision.float8 import check_float8
from lightning_shard.precision.ledger import Ledger
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.strategies import refusals
from lightning_shard.strategies.precision import ShardPrecision, raise_nonfinite, shard_precision_of
from lightning_shard.strategies.settings import CommonSettings


class ShardStrategy(ParallelStrategy):
    """Settings, the parts of a run, and Lightning's hooks. A subclass makes the engine."""

    aligned: bool
    activation_checkpointing: Checkpointing
    compile: bool
    async_save: bool | str
    preemption: PreemptionConfig
    all_frames = False  # in tracebacks of this package's errors, or only the user's

    def __init__(self, settings: CommonSettings) -> None:
        """Build the parts. Nothing else is touched before the Trainer sets the strategy up."""
        super().__init__()
        messages.filter_messages()
        self._settings, self.num_nodes = settings, 1
        vars(self).update(vars(settings))
        own = {"configured": settings.resume_hyperparameters == "configuration", "save_frozen": settings.save_frozen}
        self.checkpoints = parts.Checkpoints(raise_nonfinite=partial(raise_nonfinite, self), **own)
        self.memory: parts.RunMemory | None = None  # from a run's set-up on
        waits = settings.timeout_seconds, settings.init_timeout_seconds
        self._processes = parts.Processes(settings.mesh, *waits, settings.process_group_backend)
        self.timeout = self._processes.timeout
        self._preemption = parts.Preemption(self.preemption, self.checkpoints)
        self._watch = parts.RunWatch(settings.lost_rank_seconds, settings.stuck_seconds, self._preemption.end_process)
        self._data = parts.Data(sample_seeds=self.aligned if settings.sample_seeds is None else settings.sample_seeds)
        self._predictions, self._saves = parts.Predictions(), callbacks.HeldSaves()
        self._replacements, self._identity = Replacements(), parts.RunIdentity()
        self._ledger: parts.DtypeLedger | None = None  # of a fit
        self._engine: Engine | None = None
        self._trainer: Trainer | None = None  # of the run, from its set-up on

    _start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    is_distributed = True  # else Lightning gives a custom strategy no distributed sampler
    restore_checkpoint_after_setup = True  # into the parameters that the engine left

    @abstractmethod
    def engine_for(self, module: nn.Module | None = None, *, plain: bool = False) -> Engine:
        """Make an engine with this strategy's settings, ``plain`` without options for a user's ``module``."""

    @property  # type: ignore[explicit-override] # mypy sees none on one with a setter
    @override
    def precision_plugin(self) -> ShardPrecision:
        """Precision plugin, always this package's own."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, ShardPrecision) else ShardPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = plugin = shard_precision_of(precision_plugin)
        if plugin is not None:
            plugin.begin_loss_scale(self.policy)

    @property
    def policy(self) -> PrecisionPolicy:
        """Dtypes of this run."""
        base = self.precision_plugin.policy(aligned=self.aligned, at_boundary=self._settings.at_boundary)
        return self.engine_for().policy(base, loss_scale_given=self.precision_plugin.sets_loss_scale)

    def planned_run(self, **given: Any) -> PlannedRun:
        """A run of this strategy. ``given``: fields of `PlannedRun`. Fields that the Trainer has may be left out."""
        if "ranks" not in given:
            given |= {"ranks": self.num_nodes * self.num_processes, "per_node": self.num_processes}
            given["device_type"] = self.root_device.type
        precision, aligned = self.precision_plugin.precision, self._settings.aligned
        return PlannedRun(**{"policy": self.policy, "precision": precision, "aligned": aligned, **given})

    def check(self) -> None:
        """Refuse settings that can't work, on every rank, before anything is touched (ConfigurationError)."""
        run = self.planned_run()
        resolve_mesh(self._settings.mesh, world_size=run.ranks, processes_per_node=run.per_node)
        refusals.refuse_sync_batchnorm(self._layer_sync, self.root_device)
        check_float8(run.policy.float8, self.root_device, launched=False)
        self.engine_for().check(run)

    def check_arithmetic(self) -> str:
        """Compare the engine with a plain loop (`self_check.numeric_difference`). All ranks call it before training."""
        run = Run(planned=self.planned_run(), device=self.root_device, mesh=self.device_mesh, seed=0, fitting=True)
        return self_check.numeric_difference(self.engine_for(plain=True), run)

    @property
    def engine(self) -> Engine:
        """Engine of the run, after set-up."""
        return self._engine or refusals.refuse_engine_before_run(type(self).__name__)

    @property
    def ledger(self) -> Ledger | None:
        """Measured dtypes of this fit, complete after its first optimizer step. None without a fit."""
        return None if self._ledger is None else self._ledger.measured()

    @property
    def device_mesh(self) -> DeviceMesh:
        """2-D mesh with axes ``("replicate", "shard")``, after the processes are connected."""
        return self._processes.mesh

    def finish_saving(self) -> None:
        """Wait for a background save. It raises if the save failed. All ranks call it."""
        self.checkpoints.saver.finish_background_save()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the Trainer has attached its module"
        return self.lightning_module

    @property
    def _is_interrupted(self) -> bool:
        return parts.fit.is_interrupted(self._trainer, self._engine) and not self._failed

    @property
    def _fits(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    @property
    @override
    def root_device(self) -> torch.device:
        return parts.device_of(self.parallel_devices or [], self.local_rank)

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return dict(zip(("num_replicas", "rank"), data_parallel_coordinates(self.device_mesh), strict=True))

    def set_world_ranks(self) -> None:
        self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self._environment.set_world_size(self.num_nodes * self.num_processes)
        processes.set_rank(self.global_rank)

    @property
    def _environment(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None, "the Trainer has chosen the cluster environment"
        return self.cluster_environment

    @override
    def _configure_launcher(self) -> None:
        # Everything that is known by now is checked before any process is started.
        gpu = self.root_device.type == "cuda"
        self.num_nodes = parts.nodes_started(self._environment, os.environ, self.num_nodes, self.num_processes)
        self._launch = parts.launch_of(self._environment, nodes=self.num_nodes, devices=self.num_processes, gpu=gpu)
        check_launch(read_job(os.environ), self._launch, os.environ)
        self.check()
        if not self._environment.creates_processes_externally:
            self._launcher = processes.make_launcher(self, self._start_method)

    @override
    def setup_environment(self) -> None:
        self._failed, self._replacements = False, Replacements()
        self._trainer = trainer = self._module.trainer
        refusals.refuse_trainer(trainer)
        self._identity = parts.RunIdentity.read(self.preemption, os.environ, str(trainer.default_root_dir))
        parts.fit.replace_defaults(self._replacements, trainer, self._identity, self.checkpoints, self._preemption)
        super().setup_environment()
        processes.share_cores(self.num_processes)
        reset_seed()
        self.set_world_ranks()
        own = {**plain_settings(self._settings), **self.engine_for().resolved_config()}
        compared, written = parts.fit.compared_settings(self, own, trainer), self._identity.root if self._fits else None
        self._watch.record_collectives_into(self._identity.failure_folder)
        self._processes.connect(self._environment, self._launch, self.root_device, settings=compared, root=written)
        # First, because a rank may fail in any later call.
        self._watch.start_watch(parts.count_run(), self._identity.failure_folder, self._replacements, trainer)
        refusals.refuse_stores(trainer)
        processes.set_device_mesh(self._module, self._processes.lay_mesh(per_node=self.num_processes))

    @override
    def barrier(self, name: str | None = None) -> None:
        self._processes.barrier(skip=self._is_interrupted)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return Ranks.of().broadcast(obj, src)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return processes.reduce_tensor(tensor, group, reduce_op, skip=self._is_interrupted)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module, engine = self._module, self.engine_for(self._module)
        self.accelerator.setup(trainer)
        if self._fits and self.preemption.keep_batch and module.automatic_optimization:
            parts.fit.keep_batch(trainer, self._identity)  # before the engine, which is built for it
        parts.fit.make_contiguous(module)  # before the ledger, which reads their dtypes
        run = self._begin_run(trainer, engine)
        self.model = engine.prepare(module, run)
        processes.set_device(module, self.root_device)
        self.barrier("engine")
        self._buffers = parts.SharedBuffers(module)
        self.precision_plugin.connect_engine(engine, run, module, self._settings)
        self.checkpoints.attach_engine(module, engine, run.policy, self._ledger, root=self._identity.root)
        if self._fits:
            self.setup_optimizers(trainer)
            self._attach_optimizers(trainer, engine)
        elif not parts.fit.keep_optimizers(engine, module, self.optimizers):
            self._reset_optimizers_and_schedulers()
        frozen_too = engine.gathers_in_forward and not engine.follows_freezing
        self._freezing = parts.FreezingCheck(module, frozen_too=frozen_too, named=not engine.replicates)
        self.setup_precision_plugin()
        self.checkpoints.note_optimizer_values()

    def _begin_run(self, trainer: Trainer, engine: Engine) -> Run:
        module, plan = self._module, self.planned_run(accumulate_grad_batches=trainer.accumulate_grad_batches)
        self._engine, self._ledger, forward = engine, None, self._settings.forward
        check_float8(plan.policy.float8, self.root_device, launched=True)
        self.memory = parts.RunMemory(module, engine, plan, device=self.root_device, recomputes=forward.recomputes)
        if self._fits:
            checked = f"{type(self).__name__} in precision {plan.precision!r}"
            parts.fit.check_untested_versions(checked, self.check_arithmetic, aligned=self.aligned)
            refusals.refuse_callbacks(trainer, engine, checked)
            refusals.refuse_gradient_hooks(trainer, engine, self._settings)
            parts.fit.hold_saves(self._replacements, trainer, engine, self.checkpoints, self._saves, self.async_save)
            parts.fit.before_sharding(trainer, module, self._layer_sync)
            self._ledger = parts.DtypeLedger(module, engine, plan.policy, aligned=self.aligned)
        results.log_of_full_module(self._replacements, trainer)
        return parts.fit.run_of(trainer, plan, self.root_device, self.device_mesh)

    def _attach_optimizers(self, trainer: Trainer, engine: Engine) -> None:
        made = parts.fit.same_on_all_ranks([o for o in self.optimizers if not is_missing_optimizer(o)])
        optimizers, schedule = engine.attach_optimizers(made)
        if optimizers != made:
            self.optimizers = optimizers
        if schedule is not None:
            self.lr_scheduler_configs.append(step_scheduler(schedule))
        self.checkpoints.refuse_unsavable(trainer)
        parts.fit.attach_averages(trainer, engine, self.checkpoints, self.memory)
        if self._ledger is not None:
            self._ledger.read_prepared(self.optimizers)
        refusals.warn_of_precision(self.precision_plugin.precision, self.policy, engine.upcast)
        hold_schedulers(self._replacements, trainer, when=lambda: self.precision_plugin.step_skipped)

    @property  # type: ignore[explicit-override] # mypy sees none on one with a setter
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        update_wrappers(self._lightning_optimizers)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None: ...  # the engines move the module, one unit at a time

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return self._data.prepare_loader(dataloader, self._module.trainer, data_parallel_coordinates(self.device_mesh))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        parts.fit.begin_batch(self._module.trainer, self.engine, self._buffers)
        plugin = self.precision_plugin
        with plugin.train_step_context():
            output = self.engine.forward(plugin.in_autocast(self._module.training_step), *args, **kwargs)
        self._freezing.after_forward()
        return plugin.take_weight(output, args)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._fits:
            self._preemption.stop_in_validation(self._module.trainer)
        return self._evaluate(self._module.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(self._module.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._predictions.run_step(lambda: self._evaluate(self._module.predict_step, *args, **kwargs))

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # No inference mode, even if the loop entered it. `no_grad` comes last, as leaving inference mode enables
        # gradients.
        with self.precision_plugin.forward_context(), torch.inference_mode(mode=False), torch.no_grad():
            return self.engine.evaluate(self.precision_plugin.in_autocast(step), *args, **kwargs)

    @override
    def block_backward_sync(self) -> Any:
        """Inside, backward passes end no accumulation. In manual optimization the user enters it."""
        return parts.fit.without_reduction(self.engine)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._ledger is not None:
            accumulates = self._module.automatic_optimization and loops.should_accumulate(self._module.trainer)
            self._ledger.read_backward(closure_loss, accumulates=accumulates)
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        result = step(closure=closure) if self._ledger is None else self._ledger.run_step(optimizer, closure, step)
        self.engine.reshard_and_sync_masters()  # reshards parameters that a forward without backward left gathered
        return result

    @override
    def on_train_start(self) -> None:
        trainer = self._module.trainer
        self.checkpoints.start_of_training()
        self._preemption.start_checks(self._identity)
        parts.fit.hook_batch_end(self._replacements, trainer, self.checkpoints, self._saves, self._preemption)
        self._data.restore_resumed_state(trainer)  # after everything that draws or resets
        self._preemption.note_validation(trainer)  # a resumed run may begin with it

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.checkpoints.saver.poll_background_save()
        if self._freezing.trainable_changed(batch_idx):
            self.model = self.engine.follow_freezing()  # first: DeepSpeed keeps 16-bit parameters and separate masters
            self._freezing.refuse_without_masters(self.policy.master)

    @override
    def on_train_end(self) -> None:
        self._saves.after_training()
        self.checkpoints.end_of_training()  # saves end before the run stops listening to signals
        self._data.end_training()
        self._preemption.end_checks()
        parts.warn_of_nonfinite(self.engine)

    @override
    def on_validation_start(self) -> None:
        if self._fits:  # an interrupted validation runs again from its beginning
            self._freezing.refuse_new()
            loops.reset_validation_count(self._replacements, self._module.trainer)
        self.checkpoints.synchronize_buffers()

    on_test_start = on_validation_start

    @override
    def on_predict_start(self) -> None:
        self.checkpoints.synchronize_buffers()
        own = loops.prediction_batches(self._module.trainer) if self.engine.gathers_in_forward else None
        self._predictions = parts.Predictions(own)  # counted only if forward passes need all ranks

    @override
    def on_validation_end(self) -> None:
        self.engine.reshard_and_sync_masters()  # frees parameters of the last evaluation forward
        self._saves.after_validation()

    on_test_end = on_predict_end = on_validation_end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # Nothing communicates: other ranks may be anywhere. They are told and end.
        self.checkpoints.end_saving()
        refusals.explain_error(exception, self.memory, self.checkpoints.saved, all_frames=self.all_frames)
        self._watch.report_failure(exception)
        self.checkpoints.remove_converted()
        processes.end_silently_behind_parent(exception)

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        with loops.restored_at_end(self._replacements, self._trainer):
            if self._ledger is not None:
                self._ledger.remove_hooks()
            self.checkpoints.end_saving()
            self.model = self.lightning_module
            if self._engine is not None:
                self._engine.release_module(failed=self._failed)
                if self._settings.unshard_after_fit and self._fits and not self._failed:
                    unshard_module(self._module, device=torch.device("cpu"))
                    self._reset_optimizers_and_schedulers()  # of the shards
            self._environment.teardown()  # not super's: it moves the module, which may be sharded, to the host
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self._preemption.give_signals_back()
            self._data.end_of_run()
            self._watch.end_watch()  # last: other ranks may wait for the calls above

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._is_interrupted else self.checkpoints.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the optimizers' state in place, by FQN."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        trainer = self._module.trainer
        if self._is_interrupted:
            refusals.warn_of_unsaved(trainer, filepath)
            return
        checkpoint, own = self._data.checkpoint_state(trainer, checkpoint, self._preemption.before_validation)
        running = self._fits and trainer.state.status == TrainerStatus.RUNNING
        background = bool(self.async_save) and running and not self._preemption.is_stopping
        run = self._identity.facts(trainer.global_step, trainer.world_size * trainer.accumulate_grad_batches)
        self.checkpoints.save_checkpoint(checkpoint, filepath, storage_options, own=own, run=run, background=background)
        self._preemption.note_save()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = self.checkpoints.load_checkpoint(checkpoint_path, fits=self._fits)
        if self._fits:
            self._data.give_loader_positions(checkpoint, self.global_rank)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._fits:
            self._data.keep_resumed_state(checkpoint, self._module.trainer)
        load, averaged = self.checkpoints.load_tensors, evaluates_average(self._module.trainer)
        load(checkpoint, self.lr_scheduler_configs, optimizers=self._fits, strict=strict, averaged=averaged)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._data.after_loops_loaded(self._replacements, self._module.trainer)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.checkpoints.saver.remove_checkpoint(filepath)  # once a background save is complete
