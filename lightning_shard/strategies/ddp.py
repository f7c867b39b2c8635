"""Lightning's adapter of data parallelism with full replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from lightning_shard import _lightning
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicate import Replicate, needs_replicate
from lightning_shard.engines.torch_ddp import DDPOptions, TorchDDP
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.settings import AccumulateSync, CommonSettings
from lightning_shard.strategies.strategy import ShardStrategy


class ShardDDPStrategy(ShardStrategy):
    """Data parallelism with a whole replica on every rank.

    Precision ``32-true`` runs on torch's ``DistributedDataParallel``. Every other precision, and a model with frozen
    16-bit parameters, runs on torch's FSDP2-based ``replicate``, which casts, reduces and accumulates exactly as
    ``ShardFSDPStrategy`` does. The options below say which of the two honours them.
    """

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
            static_graph: the graph never changes between steps. torch's DDP only. The first step of a run, a resumed
                one too, sums in an order of its own then, which shows in the last bit from 3 ranks on.
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
        by_default: AccumulateSync = "micro_batch" if aligned else "boundary"
        settings = CommonSettings(
            mesh=MeshConfig(replicate="auto", shard=1),
            aligned=aligned,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            accumulate_sync=by_default if accumulate_sync == "auto" else accumulate_sync,
            log_grad_norm=log_grad_norm,
            error_if_nonfinite=error_if_nonfinite,
            timeout_seconds=timeout_seconds,
            process_group_backend=process_group_backend,
            init_timeout_seconds=init_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            preemption=preemption or PreemptionConfig(),
            async_save=async_save,
        )
        super().__init__(settings)
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
        self._options = DDPOptions(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            comm_hook=comm_hook,
            comm_state=comm_state,
        )
        self._start_method = start_method

    def engine_for(self, module: nn.Module | None = None) -> Engine:
        """Torch's DDP in fp32, FSDP2's replicate where something is cast."""
        casts = self._base_policy.compute != torch.float32 or (module is not None and needs_replicate(module))
        forward, at_boundary = self._settings.forward, self._settings.at_boundary
        if not casts:
            return TorchDDP(self._options, forward, at_boundary=at_boundary)
        # Lightning hands a state dict back to the main process, whose module is full and plain.
        plain = self._start_method != "popen"
        return Replicate(self._options, forward, at_boundary=at_boundary, plain_state_dict=plain)

    def _make_launcher(self) -> Any:
        if self._start_method == "popen":
            return super()._make_launcher()
        return _lightning.MultiProcessingLauncher(self, start_method=self._start_method)


def _named(value: Any) -> str:
    """A value as a message shows it: a function by its name."""
    return str(getattr(value, "__name__", value))
