"""Lightning's adapter of data parallelism with full replicas."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch import nn
from typing_extensions import override

from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicate import Replicate, needs_replicate
from lightning_shard.engines.torch_ddp import DDPOptions, TorchDDP
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.settings import CommonArguments, CommonSettings, with_common_arguments
from lightning_shard.strategies.strategy import ShardStrategy


class ShardDDPStrategy(ShardStrategy):
    """Data parallelism with a full replica on every rank.

    Precision ``32-true`` runs on torch's ``DistributedDataParallel``. Every other precision, and a model with frozen
    16-bit parameters, runs on FSDP2 with one shard, which casts, reduces and accumulates exactly as
    ``ShardFSDPStrategy`` does. Each option below names the one that it applies to.
    """

    @with_common_arguments
    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: Literal["fp16_compress", "bf16_compress"] | Callable[..., Any] | None = None,
        comm_state: Any = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **common: Unpack[CommonArguments],
    ) -> None:
        """Set up data parallelism.

        Args:
            find_unused_parameters: ranks may use different parameters in a step. Unused ones count as zero, and a
                parameter that no rank used is not stepped. Both.
            static_graph: the graph never changes between steps. torch's DDP and automatic optimization only. The first
                step of a run, of a resumed one too, sums in another order, which shows in the last bit from 3 ranks on.
            gradient_as_bucket_view: gradients lie in the reduction buckets, which saves a copy. torch's DDP only.
            broadcast_buffers: give every rank the buffers of rank 0 at each step's beginning, as other engines do.
                False needs torch's DDP. Evaluation and checkpoints use rank 0's buffers in any case.
            bucket_cap_mb: size of the reduction buckets in MiB. Default: torch's. torch's DDP only: FSDP2 reduces by
                shard unit.
            comm_hook: how a bucket of gradients is reduced: "fp16_compress" and "bf16_compress" do it in 16 bits. Or a
                function ``(state, bucket) -> future``, in YAML its import path, such as
                ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook``. torch's DDP only, and
                never under ``aligned``, whose reduction is fp32.
            comm_state: first argument of a ``comm_hook`` function, such as a ``PowerSGDState``.
            start_method: how the other processes of this node are started: "popen" runs the script again. "fork" works
                in notebooks, "spawn" and "forkserver" if the script's objects can be pickled.

        Raises:
            ConfigurationError: a value that can't work, before anything is touched.
        """
        settings = CommonSettings(mesh=MeshConfig(replicate="auto", shard=1), **common)
        if settings.accumulate_sync == "auto":
            settings = replace(settings, accumulate_sync="micro_batch" if settings.aligned else "boundary")
        super().__init__(settings)
        named = getattr(comm_hook, "__name__", comm_hook)
        if settings.aligned and comm_hook is not None:
            raise ConfigurationError(
                f"comm_hook is {named}, which changes how gradients are reduced, but aligned: true holds reduction in "
                "fp32. Remove comm_hook, or use shard_ddp."
            )
        if comm_state is not None and not callable(comm_hook):
            raise ConfigurationError(f"comm_state is given, but comm_hook is {named}, which takes none: remove it.")
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

    @override
    def engine_for(self, module: nn.Module | None = None, *, plain: bool = False) -> Engine:
        """Torch's DDP in fp32, FSDP2 with one shard if anything is cast."""
        compute = self.precision_plugin.policy(aligned=self.aligned).compute
        casts = compute != torch.float32 or (module is not None and needs_replicate(module))
        options, forward = self._options, self._settings.forward
        if plain:  # One micro-batch of the check leaves a parameter out.
            options, forward = DDPOptions(find_unused_parameters=True), ForwardOptions()
        kind = Replicate if casts else TorchDDP
        return kind(options, forward, at_boundary=self._settings.at_boundary)
