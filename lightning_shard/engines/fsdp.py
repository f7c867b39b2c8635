"""FSDP2 over a module tree: plain functions that Lightning's strategies call in order.

The order in `shard` matters: activation checkpointing wraps a unit's forward, compilation takes the checkpointed
forward whole, and FSDP's hooks lie outside of both, so that a unit is gathered once for a recomputing backward and
no graph holds a collective. Both act on ``module.forward``, so that no FQN gains a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard.engines._fsdp2 import dtypes_of, replicate, whole_gradients
from lightning_shard.engines.forward import gather_on_read, reshard
from lightning_shard.engines.materialize import Created, find_initializers, materialize
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.transforms import Checkpointing, checkpointed_modules, compiled_modules, transform
from lightning_shard.engines.units import Unit, UnitSpec, class_name, find_units
from lightning_shard.errors import PrecisionError, WrappingError
from lightning_shard.mesh import REPLICATE, SHARD
from lightning_shard.precision.casting import cast_trainable_parameters, compute_in, install_casts
from lightning_shard.precision.policy import PrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What a user sets about sharding, apart from the mesh and the precision; see ``ShardFSDPStrategy``."""

    units: UnitSpec = "auto"
    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    activation_checkpointing: Checkpointing = None
    compile: bool = False
    ignored_modules: tuple[str, ...] = ()
    replicate_only: bool = False
    """Use the FSDP2-based ``replicate`` over a mesh whose shard axis has size 1."""
    reduce_unused: bool = False
    """Reduce zeros for parameters without a gradient, for ranks that use different ones (torch 2.13)."""


@dataclass(kw_only=True)
class ShardedModule:
    """A module tree under FSDP2, and what is needed to drive it and to let go of it."""

    root: nn.Module
    mesh: DeviceMesh
    policy: PrecisionPolicy
    options: ShardingOptions
    units: tuple[Unit, ...]
    ignored: tuple[nn.Parameter, ...]
    """Trainable parameters outside of FSDP, whole on every rank; their gradients are averaged before a step."""
    upcast: dict[str, torch.dtype]
    """FQNs of the parameters that were loaded in another dtype than the masters', with that dtype."""
    undo: list[Callable[[], None]] = field(default_factory=list)


def shard(
    root: nn.Module,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    policy: PrecisionPolicy,
    options: ShardingOptions,
    seed: int,
    separate_children: bool = False,
) -> ShardedModule:
    """Shard ``root`` in place over a 2-D mesh with axes ``replicate`` and ``shard``. Collective: all ranks call it.

    A rank holds its shards and at most one whole unit at any time, for a model on the meta device from the start,
    for one on the host as far as ``device`` is concerned. Values of rank 0 win where ranks built different ones.
    A tree in which the user already applied ``fully_shard`` keeps its units.

    Args:
        root: the LightningModule.
        mesh: from `lightning_shard.mesh.build_mesh`.
        device: where this rank computes.
        policy: the precision policy; trainable parameters end in ``policy.master``.
        options: what the user set.
        seed: the run's seed, equal on all ranks, for modules on the meta device.
        separate_children: make each child of ``root`` a unit. Manual optimization runs several backward passes in
            one step, each over a part of the model; the rest need not be gathered and reduced with it.

    Raises:
        WrappingError, MaterializationError, PrecisionError: before anything was changed.
    """
    units = _users_units(root, policy)
    if units is None:
        units = find_units(root, options.units, with_children=separate_children)
    ignored_modules, ignored = ignored_parameters(root, options.ignored_modules)
    checkpointed = checkpointed_modules(root, units, options.activation_checkpointing)
    compiled = compiled_modules(units, options.compile)
    initializers = find_initializers(root)

    sharded = ShardedModule(
        root=root, mesh=mesh, policy=policy, options=options, units=tuple(units), ignored=(), upcast={}
    )
    # First, so that what checkpointing runs again in backward has the casts in it.
    if policy.compute != torch.float32:
        sharded.undo.append(install_casts(root, policy.compute, whole=ignored_modules, output=policy.output))
    else:
        sharded.undo.extend(compute_in(m, torch.float32) for m in ignored_modules)
    sharded.undo.extend(transform(checkpointed, options.activation_checkpointing, compiled))

    prepare = _preparation(root, device=device, seed=seed, initializers=initializers)
    apply = _applier(mesh, policy, options)
    children = set(root.children())
    for unit in units:
        prepare(unit.modules)
        if isinstance(unit.modules[0], FSDPModule):
            continue
        outermost = separate_children and children.issuperset(unit.modules)
        apply(unit.modules, reshard=False if outermost else options.reshard_after_forward, ignored=ignored())
    prepare((root,))
    if not isinstance(root, FSDPModule):
        # None: torch keeps the root gathered between forward and backward, whatever the units do.
        apply((root,), reshard=None, ignored=ignored())
    # Read after it, because it replaces parameters.
    sharded.upcast = cast_trainable_parameters(root, policy.master)
    sharded.ignored = tuple(p for p in ignored() if p.requires_grad)
    sharded.undo.append(gather_on_read(root))
    if options.reduce_unused:
        _reduce_unused(root)
    _set_prefetch([m for m in root.modules() if isinstance(m, FSDPModule) and m is not root], options)
    return sharded


def _users_units(root: nn.Module, policy: PrecisionPolicy) -> list[Unit] | None:
    """The modules below ``root`` that the user applied ``fully_shard`` to, inner before outer; None: to none at all.

    Raises:
        PrecisionError: their dtypes are not the policy's.
    """
    sharded = [(fqn, m) for fqn, m in root.named_modules() if isinstance(m, FSDPModule)]
    if wrong := [fqn for fqn, m in sharded if dtypes_of(m) != (policy.compute, policy.reduce)]:
        raise PrecisionError(
            f"configure_model applied fully_shard to {', '.join(f or '(root)' for f in wrong)} with other dtypes than "
            f"the run's ({policy.text()}). Pass it mp_policy=MixedPrecisionPolicy(param_dtype={policy.compute}, "
            f"reduce_dtype={policy.reduce}, cast_forward_inputs=False), or leave the sharding to the strategy."
        )
    units = [Unit(names=(fqn,), modules=(m,)) for fqn, m in reversed(sharded) if m is not root]
    return units if sharded else None


def _preparation(
    root: nn.Module, *, device: torch.device, seed: int, initializers: Mapping[nn.Module, Callable[[], object]]
) -> Callable[[tuple[nn.Module, ...]], None]:
    """A function that gives the modules below some tops, but for those done before, their device and values, whole."""
    fqns = {module: fqn for fqn, module in root.named_modules()}
    created: Created = {}
    done: set[nn.Module] = set()

    def prepare(tops: tuple[nn.Module, ...]) -> None:
        inside = {m for top in tops for m in top.modules()} - done
        done.update(inside)
        modules = [m for m in fqns if m in inside]
        materialize(modules, device=device, seed=seed, fqns=fqns, initializers=initializers, created=created)
        for module in modules:
            _move_own_tensors(module, device)
            if module not in initializers:
                broadcast_from_rank_0([*module.parameters(recurse=False), *module.buffers(recurse=False)])

    return prepare


def ignored_parameters(
    root: nn.Module, class_names: Iterable[str]
) -> tuple[list[nn.Module], Callable[[], dict[nn.Parameter, None]]]:
    """The modules of the named classes, and a function that reads the parameters that FSDP is to leave alone.

    Those are the modules' own, those of torchmetrics (a metric's own network is no part of the model), and 0-d ones,
    which can't be cut; in registration order, as the keys of a dict, so that all ranks reduce them in one order. It
    is a function because materialisation replaces parameter objects.

    Raises:
        WrappingError: a class name that matches nothing.
    """
    names = set(class_names)
    present = {class_name(m) for m in root.modules()}
    if missing := sorted(names - present):
        raise WrappingError(
            f"ignored_modules names {', '.join(map(repr, missing))}, but the model has no module of that class. "
            f"Classes that are there: {', '.join(sorted(present))}."
        )
    named = [m for m in root.modules() if class_name(m) in names]
    tops = [*named, *(m for m in root.modules() if isinstance(m, Metric))]

    def read() -> dict[nn.Parameter, None]:
        whole = {p for top in tops for p in top.parameters()}
        return dict.fromkeys(p for p in root.parameters() if p in whole or p.ndim == 0)

    return named, read


def _applier(mesh: DeviceMesh, policy: PrecisionPolicy, options: ShardingOptions) -> Callable[..., None]:
    mp_policy = MixedPrecisionPolicy(
        # Given in fp32 too: a frozen parameter in another dtype is then seen in fp32.
        param_dtype=policy.compute,
        reduce_dtype=policy.reduce,
        # Inputs are cast by `install_casts`, which knows a batch's targets from a module's inputs.
        cast_forward_inputs=False,
    )
    if options.replicate_only:
        assert mesh[SHARD].size() == 1

        def apply_replicate(modules: tuple[nn.Module, ...], *, reshard: Any, ignored: Iterable[nn.Parameter]) -> None:
            replicate(modules, mesh=mesh[REPLICATE], mp_policy=mp_policy, ignored_params=set(ignored))

        return apply_replicate

    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    # Without copies the reduction ends after the reduce-scatter: a 1-D mesh saves an all-reduce over one rank.
    over = mesh if mesh[REPLICATE].size() > 1 else mesh[SHARD]

    def apply_shard(modules: tuple[nn.Module, ...], *, reshard: Any, ignored: Iterable[nn.Parameter]) -> None:
        fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=over,
            reshard_after_forward=reshard,
            mp_policy=mp_policy,
            offload_policy=offload,
            ignored_params=set(ignored) or None,
        )

    return apply_shard


@torch.no_grad()
def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, Metric):
        # Its states are neither parameters nor buffers.
        module.to(device)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            # Contiguous, as fully_shard wants it: weights in channels_last are not.
            tensor.data = tensor.data.to(device).contiguous()


def _reduce_unused(root: nn.Module) -> None:
    switch = getattr(root, "set_reduce_scatter_unused_params", None)
    if switch is None:
        raise WrappingError(
            f"find_unused_parameters: true needs torch 2.13 or newer here, and this is torch {torch.__version__}. "
            "Remove it if all ranks use the same parameters in every step."
        )
    switch(True)


def _set_prefetch(modules: list[FSDPModule], options: ShardingOptions) -> None:
    """Gather the next ``n`` units early, by registration order (forward) and against it (backward)."""
    for index, module in enumerate(modules):
        if options.forward_prefetch:
            ahead = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch(ahead)
        if options.backward_prefetch:
            before = modules[max(0, index - options.backward_prefetch) : index]
            module.set_modules_to_backward_prefetch(before[::-1])


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Reduce gradients in the next backward passes, or sum them whole on each rank until it is switched on again."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(enabled)


def unreduced_gradients(root: nn.Module) -> list[tuple[str, Tensor]]:
    """The gradients that units hold whole for a reduction at the boundary, by their parameters' FQNs."""
    names = {module: fqn for fqn, module in root.named_modules()}
    found = [held for m in names if isinstance(m, FSDPModule) for held in whole_gradients(m)]
    return [(f"{names[owner]}.{name}".lstrip("."), gradient) for owner, name, gradient in found]


def release(sharded: ShardedModule) -> None:
    """Take back hooks and patched forwards; the parameters stay sharded."""
    reshard(sharded.root)
    while sharded.undo:
        sharded.undo.pop()()
