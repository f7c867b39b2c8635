"""A strategy's settings as the plain facts that bytes, traffic and time are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from lightning_shard.engines import ddp, fsdp
from lightning_shard.engines.deepspeed_config import RunFacts, deepspeed_config
from lightning_shard.mesh import resolve_mesh
from lightning_shard.planning.facts import Engine, ModelFacts, Replicas, Shards, model_facts, zero_from
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.strategies.deepspeed_facts import hidden_size
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from lightning_shard.wrapping import Unit, find_units

if TYPE_CHECKING:
    from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy


def units_of(strategy: ShardStrategy, module: nn.Module, *, separate_children: bool = False) -> list[Unit]:
    """The units that a strategy gathers or steps through, of a module whose parameters are whole."""
    if isinstance(strategy, ShardFSDPStrategy):
        return find_units(module, strategy._options.units, with_children=separate_children)
    return find_units(module, "auto", with_children=False)


def check_precision(strategy: ShardStrategy) -> None:
    """Refuse a precision that a strategy does not run, as it does itself before a run.

    Raises:
        PrecisionError: with what to use.
    """
    _ = strategy.policy
    if not isinstance(strategy, ShardDDPStrategy | ShardFSDPStrategy):
        cast("ShardDeepSpeedStrategy", strategy)._check_precision()


def facts_of(
    strategy: ShardStrategy, module: nn.Module, *, groups: Any = (), separate_children: bool = False
) -> ModelFacts:
    """The facts of a module under a strategy; its parameters are whole, real or without data."""
    names = strategy._options.ignored_modules if isinstance(strategy, ShardFSDPStrategy) else ()
    _, whole = fsdp.ignored_parameters(module, names)
    units = units_of(strategy, module, separate_children=separate_children)
    return model_facts(module, units=units, whole=whole(), groups=groups)


def engine_of(
    strategy: ShardStrategy,
    module: nn.Module,
    *,
    ranks: int,
    per_node: int,
    device_type: str = "cuda",
    accumulate_grad_batches: int = 1,
    optimizer: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of a strategy on ``ranks`` processes, ``per_node`` of them on each node.

    Args:
        strategy: with its precision plugin set.
        module: whole; its frozen parameters and sizes decide a few things.
        ranks: processes of the run.
        per_node: processes of a node.
        device_type: "cuda" or "cpu".
        accumulate_grad_batches: the Trainer's.
        optimizer: ``type`` and hyperparameters of the optimizer, for DeepSpeed's "auto" values.

    Raises:
        ConfigurationError: settings that do not fit the number of processes, or each other.
    """
    policy = strategy.policy
    if isinstance(strategy, ShardDDPStrategy):
        return Replicas(
            ranks=ranks,
            composable=policy.compute.itemsize != 4 or ddp.needs_composable(module),
            gradients_in_buckets=strategy._ddp_options.gradient_as_bucket_view,
            at_boundary=strategy._syncs_at_boundary,
        )
    if isinstance(strategy, ShardFSDPStrategy):
        replicate, shard = resolve_mesh(strategy.mesh_config, world_size=ranks, processes_per_node=per_node)
        options = strategy._options
        return Shards(
            replicate=replicate,
            shard=shard,
            reshard_after_forward=options.reshard_after_forward,
            cpu_offload=options.cpu_offload,
            backward_prefetch=options.backward_prefetch,
            at_boundary=strategy._syncs_at_boundary,
        )
    return zero_from(
        _deepspeed_config(strategy, module, ranks, device_type, accumulate_grad_batches, optimizer),
        ranks=ranks,
        accumulate=policy.accumulate,
        device_type=device_type,
    )


def _deepspeed_config(
    strategy: ShardStrategy,
    module: nn.Module,
    ranks: int,
    device_type: str,
    accumulate_grad_batches: int,
    optimizer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    deepspeed = cast("ShardDeepSpeedStrategy", strategy)
    facts = RunFacts(
        world_size=ranks,
        device_type=device_type,
        policy=deepspeed.policy,
        aligned=deepspeed.aligned,
        accumulate_grad_batches=accumulate_grad_batches,
        optimizer=optimizer,
        hidden_size=hidden_size(module),
        number_of_parameters=sum(p.numel() for p in module.parameters()),
    )
    return deepspeed_config(deepspeed._fields, facts)
