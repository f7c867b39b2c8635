"""What the strategies of all engines share: processes, mesh, precision, clipping, accumulation, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard import _lightning
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.strategies.precision import ShardPrecision, low_memory_warning, translate
from lightning_shard.strategies.stock_callbacks import refuse_callbacks
from lightning_shard.strategies.transforming import TransformingStrategy
from lightning_shard.tensors.clipping import clip_by_norm, clip_by_value, gradient_norm, gradients_of

AccumulateSync = Literal["auto", "boundary", "micro_batch"]


class ShardStrategy(TransformingStrategy):
    """Base of the strategies; a subclass says how its engine prepares a module and synchronises gradients."""

    def __init__(
        self,
        *,
        mesh: MeshConfig,
        aligned: bool,
        activation_checkpointing: Checkpointing,
        compile: bool,
        accumulate_sync: AccumulateSync,
        log_grad_norm: bool,
        error_if_nonfinite: bool,
        timeout_seconds: float,
        process_group_backend: str | None,
        init_timeout_seconds: float = 300.0,
        lost_rank_seconds: float | None = 120.0,
        preemption: PreemptionConfig | None = None,
        async_save: bool = False,
    ) -> None:
        """Store the settings; nothing is touched before the Trainer sets the strategy up."""
        super().__init__(
            mesh=mesh,
            timeout_seconds=timeout_seconds,
            init_timeout_seconds=init_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            preemption=preemption,
            process_group_backend=process_group_backend,
        )
        if accumulate_sync not in ("auto", "boundary", "micro_batch"):
            raise ConfigurationError(
                f"accumulate_sync is {accumulate_sync!r}, but must be 'auto', 'boundary' or 'micro_batch'."
            )
        self.aligned = aligned
        self.activation_checkpointing = activation_checkpointing
        self.compile = compile
        self.accumulate_sync = accumulate_sync
        self.log_grad_norm = log_grad_norm
        self.error_if_nonfinite = error_if_nonfinite
        self.async_save = async_save

    def _check_configuration(self) -> None:
        """Refuse, before any process or parameter is touched, what can't work; see also the parent's."""
        super()._check_configuration()
        _ = self.policy
        if _lightning.layer_sync(self) is not None and self.root_device.type == "cpu":
            raise ConfigurationError(
                "sync_batchnorm is true, but torch's SyncBatchNorm runs on GPUs alone. Set sync_batchnorm: false for "
                "accelerator: cpu."
            )

    # Precision

    @property
    def precision_plugin(self) -> ShardPrecision:
        """The precision plugin, always this package's own."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, ShardPrecision) else ShardPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        plugin = translate(precision_plugin)
        if plugin is not None:
            plugin.connect_to_strategy(
                clip=self._clip_gradients,
                gradients=self._gradients,
                policy=self._policy_of(plugin),
                device=lambda: self.root_device,
                **self._engine_steps(),
            )
        self._precision_plugin = plugin

    def _engine_steps(self) -> dict[str, Any]:
        """``step`` and ``backward`` of `ShardPrecision.connect_to_strategy`, where the engine does them."""
        return {}

    def _policy_of(self, plugin: ShardPrecision) -> PrecisionPolicy:
        return plugin.policy(aligned=self.aligned, at_boundary=self._syncs_at_boundary)

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes of this run."""
        return self._policy_of(self.precision_plugin)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of a fit; Lightning wraps them anew whenever they are set."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._lightning_optimizers = _lightning.wrapped(optimizers, self)

    # Set-up

    def setup(self, trainer: Trainer) -> None:
        """Hand the module to the engine, then build the optimizers on the parameters that it left."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        _lightning.use_no_grad_in_evaluation(self._replacements, trainer)
        if fitting:
            refuse_callbacks(
                _lightning.callbacks(trainer),
                whole=self._keeps_parameters_whole(),
                saving=bool(trainer.checkpoint_callbacks),
                run=f"{type(self).__name__} in precision {self.precision_plugin.precision!r}",
            )
            if (sync := _lightning.layer_sync(self)) is not None:
                sync.apply(self.lightning_module)
            self._before_sharding(trainer)
            self._begin_ledger(self.lightning_module)
        self.model = self._prepare_module(self.lightning_module, fitting=fitting)
        _lightning.set_device(self.lightning_module, self.root_device)
        self.barrier("engine")
        self._parameters = list(self.lightning_module.parameters())
        self._trainable = [p.requires_grad for p in self._parameters]
        # Optimizers of an earlier run refer to parameters that may have been replaced.
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
            self._engage(trainer)
            self._check_start()
            self._warn_low_memory()
            _lightning.hold_schedulers(self._replacements, trainer, when=lambda: self.precision_plugin.step_skipped)
        self.setup_precision_plugin()

    def _keeps_parameters_whole(self) -> bool:
        """Whether every rank has plain parameters, not DTensors."""
        return False

    @abstractmethod
    def _prepare_module(self, module: LightningModule, *, fitting: bool) -> nn.Module:
        """Let the engine shard or replicate ``module`` in place and return what forwards run through."""

    def _engage(self, trainer: Trainer) -> None:
        """Let an engine that steps by itself take over the optimizers, in a fit."""

    def _agreed_seed(self) -> int:
        """Rank 0's seed, on every rank."""
        return int(self.broadcast(torch.initial_seed()))

    def _warn_upcast(self, upcast: Mapping[str, torch.dtype]) -> None:
        if not upcast:
            return
        names = list(upcast)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        dtypes = ", ".join(sorted({str(d).removeprefix("torch.") for d in upcast.values()}))
        master = str(self.policy.master).removeprefix("torch.")
        rank_zero_warn(
            f"{len(names)} trainable parameters were loaded in {dtypes} and are stepped as {master} masters: {shown}."
        )

    def _warn_low_memory(self) -> None:
        if self.policy.is_low_memory:
            rank_zero_warn(low_memory_warning(self.precision_plugin.precision, self.policy, self.optimizers))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Where ``trainer.init_module`` makes tensors: on the host, or on the meta device if ``empty_init``."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Move the module to this rank's device; the engines do it one unit at a time."""

    # Gradients

    @property
    def _syncs_at_boundary(self) -> bool:
        return self.accumulate_sync == "boundary"

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Hold gradient reduction back, if ``accumulate_sync`` says that it waits for the boundary.

        Lightning enters it for every micro-batch but the last of an accumulation; in manual optimization it is the
        user's to enter.
        """
        if not self._syncs_at_boundary:
            yield
            return
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    @abstractmethod
    def _set_gradient_sync(self, enabled: bool) -> None:
        """Reduce gradients in the backward passes to come, or sum them on each rank."""

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, finish what the engine left of the gradients' reduction, clip, and step."""

        def closure_with_whole_gradients() -> Any:
            result = closure()
            self._finish_gradients()
            return result

        return super().optimizer_step(optimizer, closure_with_whole_gradients, model, **kwargs)

    def _finish_gradients(self) -> None:
        """Reduce gradients that the engine does not."""

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's reduced gradients of ``optimizer``: DTensors, or plain tensors."""
        return gradients_of(p for group in optimizer.param_groups for p in group["params"])

    @property
    def _gradient_pieces(self) -> DeviceMesh | None:
        """The mesh over whose ranks plain gradients are disjoint pieces; None where they are whole."""
        return None

    def _clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str) -> None:
        """Clip by norm or value, and log the norm before it (`grad_norm`) where one was computed."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            # The user clips ahead of `optimizer_step`.
            self._finish_gradients()
        gradients = self._gradients(optimizer)
        norm: Tensor | None = None
        if self.log_grad_norm or (clip_val > 0 and algorithm == "norm"):
            norm = gradient_norm(gradients, sharded_over=self._gradient_pieces)
        if clip_val > 0 and algorithm == "norm":
            clip_by_norm(gradients, clip_val, norm=norm, error_if_nonfinite=self.error_if_nonfinite)
        elif clip_val > 0:
            clip_by_value(gradients, clip_val)
        if norm is not None:
            self.lightning_module.log("grad_norm", norm)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follow what was frozen and thawed since the last step, as ``BackboneFinetuning`` does between epochs.

        Raises:
            ConfigurationError: a thawed parameter that has no master, since it was loaded in 16 bits and frozen.
        """
        super().on_train_batch_start(batch, batch_idx)
        trainable = [p.requires_grad for p in self._parameters]
        if trainable == self._trainable:
            return
        self._trainable = trainable
        master = self.policy.master
        stepped = [p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()]
        if thawed := [dtype for dtype in stepped if dtype != master]:
            raise ConfigurationError(
                f"{len(thawed)} parameters were thawed that were frozen in {thawed[0]} when the fit began, and so have "
                f"no {master} masters. Load them in {master}, or let the fit begin with them trainable."
            )
        self._follow_freezing()

    @abstractmethod
    def _follow_freezing(self) -> None:
        """Tell the engine that other parameters have gradients from now on."""

    def _release(self) -> None:
        """Let go of the run's resources, without Lightning's move of the module, which may be cut, to the host."""
        self._end_saving()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
