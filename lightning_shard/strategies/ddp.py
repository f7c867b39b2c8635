"""Lightning's adapter of data parallelism with whole replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_shard import _lightning
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines import ddp, fsdp
from lightning_shard.engines.facts import ReplicateFacts, TorchDDPFacts
from lightning_shard.engines.transforms import Checkpointing, checkpointed_modules, compiled_modules, transform
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.casting import cast_trainable_parameters
from lightning_shard.strategies.base import AccumulateSync
from lightning_shard.strategies.composable import ComposableStrategy
from lightning_shard.strategies.cut_modules import refuse_cut_by_fsdp, refuse_cut_by_zero
from lightning_shard.strategies.planned import PlannedRun


class ShardDDPStrategy(ComposableStrategy):
    """Data parallelism with a whole replica on every rank.

    Precision ``32-true`` runs on torch's ``DistributedDataParallel``. Every other precision, and a model with frozen
    16-bit parameters, runs on torch's FSDP2-based ``replicate``, which casts, reduces and accumulates exactly as
    ``ShardFSDPStrategy`` does. The options below say which of the two honours them.
    """

    engine = "ddp"

    def __init__(
        self,
        *,
        aligned: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: Literal["fp16_compress", "bf16_compress"] | Callable[..., Any] | None = None,
        comm_state: Any = None,
        activation_checkpointing: Checkpointing = None,
        compile: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accumulate_sync: AccumulateSync = "auto",
        log_grad_norm: bool = False,
        error_if_nonfinite: bool = False,
        timeout_seconds: float = 1800.0,
        process_group_backend: str | None = None,
        init_timeout_seconds: float = 300.0,
        lost_rank_seconds: float | None = 120.0,
        preemption: PreemptionConfig | None = None,
        async_save: bool = False,
    ) -> None:
        """Set up data parallelism.

        Args:
            aligned: hold the precision contract: fp32 masters, optimizer state, reduction and accumulation whatever
                the Trainer's precision says.
            find_unused_parameters: ranks may use different parameters in a step; the others count as zero. Honoured
                by both; ``replicate`` needs torch 2.13 for it, and no option where all ranks leave out the same ones.
            static_graph: the graph never changes between steps. torch's DDP only.
            gradient_as_bucket_view: gradients lie in the reduction buckets, which saves a copy. torch's DDP only.
            broadcast_buffers: give every rank the buffers of rank 0 before each training forward. torch's DDP only;
                on both, evaluation and checkpoints use rank 0's buffers.
            bucket_cap_mb: size of the reduction buckets in MiB; default: torch's. torch's DDP only: ``replicate``
                reduces by shard unit.
            comm_hook: how a bucket of gradients is reduced: "fp16_compress" and "bf16_compress" do it in 16 bits; or
                a function ``(state, bucket) -> future``, in YAML its import path, such as
                ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook``. torch's DDP only, and
                never under ``aligned``, whose reduction is fp32.
            comm_state: what a ``comm_hook`` function gets as its first argument, such as a ``PowerSGDState``.
            activation_checkpointing: recompute forward in backward: "units" for every repeated block, n for every n-th,
                or a list of class names; "selective" for every block but its matrix products, convolutions and
                attention (without dropout), which are kept.
            compile: compile every repeated block's forward with ``torch.compile``; what it can't compile runs as it
                is, with a warning.
            start_method: how the other processes of this node are started: "popen" runs the script again; "fork"
                works in notebooks, "spawn" and "forkserver" where the script's objects can be pickled.
            accumulate_sync: when gradients are reduced under ``accumulate_grad_batches``: after each "micro_batch",
                which rounds as sharding engines do, or once at the "boundary". "auto" is "micro_batch" under
                ``aligned`` and else "boundary".
            log_grad_norm: log ``grad_norm`` also when ``gradient_clip_val`` does not need it.
            error_if_nonfinite: raise when clipping finds a norm of inf or NaN, instead of scaling by it.
            timeout_seconds: how long a collective waits before the run fails.
            process_group_backend: "nccl", "gloo", ...; default: by device.
            init_timeout_seconds: how long a rank may be late at the beginning before the others fail.
            lost_rank_seconds: how long a rank may give no sign of life before the others end with a message that
                names it; null: they wait for ``timeout_seconds``.
            preemption: what a fit does when it is told to stop by a signal or a time limit.
            async_save: let training go on while a checkpoint is written, once this rank's part is copied to the host,
                which takes memory for that one copy. A write that fails is raised at the next batch.

        Raises:
            ConfigurationError: a value that can't work, before anything is touched.
        """
        super().__init__(
            mesh=MeshConfig(replicate="auto", shard=1),
            aligned=aligned,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            accumulate_sync=accumulate_sync,
            log_grad_norm=log_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            timeout_seconds=timeout_seconds,
            process_group_backend=process_group_backend,
            init_timeout_seconds=init_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            preemption=preemption,
            async_save=async_save,
        )
        if aligned and comm_hook is not None:
            raise ConfigurationError(
                f"comm_hook is {_named(comm_hook)}, which changes how gradients are reduced, but aligned: true holds "
                "reduction in fp32. Remove comm_hook, or use shard_ddp."
            )
        if comm_state is not None and not callable(comm_hook):
            raise ConfigurationError(
                f"comm_state is given, but comm_hook is {_named(comm_hook)}, which takes none. Give a comm_hook "
                "function that uses it, or remove comm_state."
            )
        self._ddp_options = ddp.DDPOptions(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            comm_hook=comm_hook,
            comm_state=comm_state,
        )
        self._start_method = start_method
        self._set_aside: ddp.SetAsideGradients | None = None
        self._redirection = _lightning.DDPForwardRedirection()
        self._delayed_static_graph = False
        self._undo: list[Callable[[], None]] = []

    def _make_launcher(self) -> Any:
        if self._start_method == "popen":
            return super()._make_launcher()
        return _lightning.MultiProcessingLauncher(self, start_method=self._start_method)

    def _check_configuration(self) -> None:
        super()._check_configuration()
        if self.policy.compute != torch.float32:
            self._refuse_what_replicate_lacks(f"precision {self.precision_plugin.precision!r}")

    def _refuse_what_replicate_lacks(self, reason: str) -> None:
        lacking = {n: v for n, v in ddp.differing_defaults(self._ddp_options).items() if n != "find_unused_parameters"}
        if lacking:
            shown = ", ".join(f"{name}: {_named(value)}" for name, value in lacking.items())
            raise ConfigurationError(
                f"{shown} can't be honoured with {reason}, which runs on torch's FSDP2-based replicate instead of "
                "DistributedDataParallel. Remove it, or use precision '32-true'."
            )

    def planned_engine(self, module: nn.Module, run: PlannedRun) -> TorchDDPFacts | ReplicateFacts:
        """See the parent's."""
        if self.policy.compute.itemsize != 4 or ddp.needs_composable(module):
            return ReplicateFacts(ranks=run.ranks, reduce_at_boundary=self._syncs_at_boundary)
        return TorchDDPFacts(
            ranks=run.ranks,
            gradient_as_bucket_view=self._ddp_options.gradient_as_bucket_view,
            reduce_at_boundary=self._syncs_at_boundary,
        )

    def _sharding_options(self) -> fsdp.ShardingOptions:
        return fsdp.ShardingOptions(
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile,
            replicate_only=True,
            reduce_unused=self._ddp_options.find_unused_parameters,
        )

    def _prepare_module(self, module: LightningModule, *, fitting: bool) -> nn.Module:
        if not self._keeps_parameters_whole():
            if self.policy.compute == torch.float32:
                self._refuse_what_replicate_lacks("frozen 16-bit parameters")
            self._shard(module)
            if self._start_method != "popen":
                # Lightning hands a state dict back to the main process, whose module is whole and plain.
                module.register_state_dict_post_hook(_plain_values)
            return module
        refuse_cut_by_fsdp(module, type(self).__name__)
        refuse_cut_by_zero(module, type(self).__name__)
        units = self.find_units(module)
        checkpointed = checkpointed_modules(module, units, self.activation_checkpointing)
        compiled = compiled_modules(units, self.compile)
        ddp.prepare_whole(module, device=self.root_device, seed=self._agreed_seed())
        self._undo = transform(checkpointed, self.activation_checkpointing, compiled)
        self._warn_upcast(cast_trainable_parameters(module, self.policy.master))
        return self._wrap(module) if fitting else module

    def _wrap(self, module: LightningModule) -> nn.Module:
        if not any(p.requires_grad for p in module.parameters()):
            return module
        self._delayed_static_graph = False
        self._set_aside = ddp.SetAsideGradients(module) if not self._syncs_at_boundary else None
        return ddp.replicate(module, device=self.root_device, options=self._ddp_options)

    def _keeps_parameters_whole(self) -> bool:
        assert self.lightning_module is not None
        return self.policy.compute == torch.float32 and not ddp.needs_composable(self.lightning_module)

    def _follow_freezing(self) -> None:
        if self._sharded is not None:
            super()._follow_freezing()
            return
        # DDP reduces what was trainable when it was built.
        assert self.lightning_module is not None
        if isinstance(self.model, DistributedDataParallel):
            ddp.unwrap(self.model)
        self.model = self._wrap(self.lightning_module)

    @property
    def _syncs_at_boundary(self) -> bool:
        if self.accumulate_sync == "auto":
            return not self.aligned
        return self.accumulate_sync == "boundary"

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        # Evaluation needs none of DDP's collectives, and ranks may have different numbers of batches there.
        if isinstance(self.model, DistributedDataParallel) and module.trainer.training:
            return self._redirection(self.model, module, step.__name__, *args, **kwargs)
        return super()._run(step, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before backward: see `SetAsideGradients`, and start DDP's reducer by hand in manual optimization."""
        if not isinstance(self.model, DistributedDataParallel):
            super().pre_backward(closure_loss)
            return
        assert self.lightning_module is not None
        if self._set_aside is not None:
            self._set_aside.put_aside()
        if not self.lightning_module.automatic_optimization:
            _lightning.prepare_for_backward(self.model, closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """After backward: see `SetAsideGradients`."""
        if not isinstance(self.model, DistributedDataParallel):
            return
        assert self.lightning_module is not None
        if (
            self._ddp_options.static_graph
            and not self.lightning_module.automatic_optimization
            and not self._delayed_static_graph
        ):
            # With a static graph DDP holds the first reduction back until its own forward ends, which encloses
            # this backward in manual optimization.
            self.model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
            self._delayed_static_graph = True
        if self._set_aside is not None:
            self._set_aside.add_back()

    def _set_gradient_sync(self, enabled: bool) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = enabled
        else:
            super()._set_gradient_sync(enabled)

    def teardown(self) -> None:
        """Unwrap the module and, as Lightning's DDP does, move it back to the host."""
        unwrapped = isinstance(self.model, DistributedDataParallel) or self._sharded is None
        if unwrapped:
            self.model = self.lightning_module
        while self._undo:
            self._undo.pop()()
        super().teardown()
        if unwrapped and self.lightning_module is not None:
            self.lightning_module.cpu()


def _plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            state_dict[name] = value.to_local()


def _named(value: Any) -> str:
    """A value as a message shows it: a function by its name."""
    return str(getattr(value, "__name__", value))
