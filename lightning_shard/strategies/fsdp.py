"""Lightning's adapter of FSDP2."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.fsdp2 import FORWARD_METHODS, UnitOptions
from lightning_shard.engines.fully_shard import FullyShard
from lightning_shard.engines.transforms import Checkpointing
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.settings import AccumulateSync, CommonSettings
from lightning_shard.strategies.strategy import ShardStrategy


class ShardFSDPStrategy(ShardStrategy):
    """Fully sharded data parallelism on torch's FSDP2 (``fully_shard``): full, hybrid, grad-op and with offload."""

    def __init__(
        self,
        *,
        aligned: bool = False,
        mesh: MeshConfig | None = None,
        units: Literal["auto"] | int | list[str] = "auto",
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        activation_checkpointing: Checkpointing = None,
        compile: bool = False,
        ignored_modules: list[str] | None = None,
        forward_methods: list[str] | None = None,
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
        """Set up FSDP2.

        Args:
            aligned: hold the precision contract: fp32 masters, optimizer state, reduction and accumulation whatever
                the Trainer's precision says.
            mesh: sizes of the axes ``replicate`` and ``shard``. Default: one copy, cut over all processes. For
                hybrid sharding give ``replicate: auto`` and ``shard: auto``: cut inside a node, copied across nodes.
            units: which modules are gathered together. "auto": a Hugging Face model's own ``_no_split_modules``,
                else the repeated blocks of module lists; a list of class names; or a number of parameters, for the
                smallest modules that have as many. What is in no unit is gathered with the LightningModule itself.
            reshard_after_forward: true: free a unit after its forward and gather it again in backward (ZeRO-3);
                false: keep it (ZeRO-2); a number: keep a part of this many ranks (hpZ), a divisor of the shard
                axis' size other than 1 and itself.
            cpu_offload: keep parameters, gradients and optimizer state on the host and step there.
            forward_prefetch: units to gather ahead in forward; 0 leaves it to torch, which overlaps the next one.
            backward_prefetch: the same in backward.
            activation_checkpointing: recompute forward in backward: "units" for every unit, n for every n-th unit,
                or a list of class names; "selective" for every unit but its matrix products, convolutions and
                attention (without dropout), which are kept.
            compile: compile every unit's forward with ``torch.compile``; what it can't compile runs as it is, with a
                warning.
            ignored_modules: class names of modules that stay whole on every rank; their gradients are averaged
                before the step.
            forward_methods: names of methods that run a model besides ``forward``. Default: encode, generate.
            accumulate_sync: when gradients are reduced under ``accumulate_grad_batches``: after each "micro_batch"
                (keeps sharded gradients only), or once at the "boundary" (less communication, whole gradients on
                every rank). "auto" is "micro_batch".
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
        settings = CommonSettings(
            mesh=mesh or MeshConfig(),
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
            preemption=preemption or PreemptionConfig(),
            async_save=async_save,
        )
        super().__init__(settings)
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth < 0:
                raise ConfigurationError(f"{name} is {depth}, but must be 0 or the number of units to gather ahead.")
        self._units = UnitOptions(
            units=units,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            ignored_modules=tuple(ignored_modules or ()),
        )
        self._cpu_offload = cpu_offload
        self._methods = tuple(forward_methods) if forward_methods is not None else FORWARD_METHODS

    def engine_for(self, module: nn.Module | None = None) -> Engine:
        """FSDP2's ``fully_shard``, whatever the module."""
        return FullyShard(
            self._units,
            self._settings.forward,
            mesh=self._settings.mesh,
            cpu_offload=self._cpu_offload,
            at_boundary=self._settings.at_boundary,
            methods=self._methods,
        )
