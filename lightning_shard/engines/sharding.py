"""Shard a module tree with FSDP2 in place.

The order in `shard_tree` matters: activation checkpointing wraps a unit's forward, compilation wraps the checkpointed
forward, and FSDP's hooks are outside of both. So a unit is gathered once for a recomputing backward, and no graph
contains a collective. Both replace ``module.forward``, so that no FQN gains a prefix.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard.engines import forward
from lightning_shard.engines._fsdp2 import dtypes_of, leave_inputs_alone, round_each_use, units_of
from lightning_shard.engines.engine import Run
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.transforms import ForwardOptions, find_transforms
from lightning_shard.engines.units import Unit, UnitSpec, compute_dtypes, find_units, ignored_parameters, unit_rules
from lightning_shard.errors import PrecisionError, WrappingError
from lightning_shard.precision import casting
from lightning_shard.precision.policy import PrecisionPolicy

FORWARD_METHODS = ("encode", "generate")  # Common names of methods that run a model without ``forward``.

ApplyUnit = Callable[..., object]
"""``fully_shard`` or a function with its arguments, which makes a unit's module an FSDP module."""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """Options of the shard units."""

    units: UnitSpec = "auto"
    reshard_after_forward: bool | int = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    ignored_modules: tuple[str, ...] = ()
    find_unused_parameters: bool = False  # Whether ranks exchange in every step which parameters they used.
    forward_methods: tuple[str, ...] = FORWARD_METHODS  # Methods that run a model besides ``forward``.


def shard_tree(
    root: nn.Module, run: Run, options: UnitOptions, transforms: ForwardOptions, apply: ApplyUnit
) -> tuple[Mapping[str, torch.dtype], list[nn.Parameter]]:
    """Shard ``root`` in place over the run's mesh. Collective: all ranks call it.

    A rank has its shards and at most one full unit at any time on the device. Rank 0's values are broadcast. A tree in
    which the user already applied ``fully_shard`` keeps its units. In manual optimization each child of ``root`` is a
    unit too, because each backward pass of a step may reach only a part of the model. WrappingError,
    MaterializationError and PrecisionError are raised before anything is changed. Returns the loaded dtypes of
    parameters whose masters have another dtype, and the parameters that FSDP ignores.
    """
    policy, found = run.policy, _chosen_units(root, run, options.units)
    ignored_modules, ignored = ignored_parameters(root, options.ignored_modules)
    transform = find_transforms(root, found, transforms)
    prepare = _preparation(Materializer(root, device=run.device, seed=run.seed), device=run.device)
    dtypes = compute_dtypes(found, policy.compute)
    # First, so that a recomputed forward contains the casts.
    _cast(root, policy, dtypes, ignored_modules)
    transform()
    children = set(root.children())

    def make(module: nn.Module, reshard: bool | int | None, compute: torch.dtype) -> None:
        prepare(module)
        if isinstance(module, FSDPModule):
            return
        apply(
            module,
            reshard_after_forward=reshard,
            # ``param_dtype`` is set for fp32 too, so that frozen parameters in another dtype are cast. Inputs are cast
            # by `install_casts`, which leaves a batch's targets alone.
            mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=policy.reduce, cast_forward_inputs=False),
            ignored_params=set(ignored()) or None,
        )

    for unit in found:
        outermost = not run.automatic and unit.module in children
        own = unit.rule.reshard_after_forward
        reshard = False if outermost else options.reshard_after_forward if own is None else own
        make(unit.module, reshard, dtypes[unit.module])
    # None: torch keeps the root gathered between forward and backward.
    make(root, None, policy.compute)
    # After `apply`, because it replaces parameters.
    upcast = casting.cast_trainable_parameters(root, policy.master)
    forward.gather_for_calls(root)
    made = units_of(root)
    round_each_use(root)
    for below_root in made[1:]:
        leave_inputs_alone(below_root, partial(forward.note_taken_gradients, root, below_root))
    _set_prefetch(made[1:], options)
    return upcast, [*ignored()]


def _chosen_units(root: nn.Module, run: Run, spec: UnitSpec) -> list[Unit]:
    """The modules that configure_model applied ``fully_shard`` to, inner before outer, else the units by ``spec``."""
    sharded = [(fqn, m) for fqn, m in root.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        return find_units(root, spec, with_children=not run.automatic)
    policy = run.policy
    if wrong := [fqn for fqn, m in sharded if dtypes_of(m) != (policy.compute, policy.reduce)]:
        raise PrecisionError(
            f"configure_model applied fully_shard to {', '.join(f or '(root)' for f in wrong)} with other dtypes than "
            f"the run's ({policy.text()}). Pass it mp_policy=MixedPrecisionPolicy(param_dtype={policy.compute}, "
            f"reduce_dtype={policy.reduce}, cast_forward_inputs=False), or leave the sharding to the strategy."
        )
    if any(rule.special for rule in unit_rules(spec)):
        raise WrappingError(
            "units has entries with settings of their own, but configure_model applied fully_shard, whose units "
            "stay. Pass these settings there, or leave the sharding to the strategy."
        )
    return [Unit(name=fqn, module=m) for fqn, m in reversed(sharded) if m is not root]


def _cast(
    root: nn.Module, policy: PrecisionPolicy, own: Mapping[nn.Module, torch.dtype], ignored: Collection[nn.Module]
) -> None:
    """Install the policy's casts and units' own. If all computes in fp32, only ignored modules need it set."""
    if {policy.compute, *own.values()} == {torch.float32}:
        for module in ignored:
            casting.compute_in(module, torch.float32)
        return
    casting.install_casts(root, policy.compute, inside=own, whole=ignored, output=policy.output, float8=policy.float8)


def _preparation(materializer: Materializer, *, device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that moves a module tree, except modules of earlier calls, and gives it full values."""
    done: set[nn.Module] = set()

    def prepare(top: nn.Module) -> None:
        inside = set(top.modules()) - done
        done.update(inside)
        modules = [m for m in materializer.fqns if m in inside]
        materializer.fill(modules)
        for module in modules:
            _move_own_tensors(module, device)
            if module not in materializer.initializers:
                broadcast_from_rank_0([*module.parameters(recurse=False), *module.buffers(recurse=False)])

    return prepare


@torch.no_grad()
def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, Metric):
        # A metric's states are neither parameters nor buffers.
        module.to(device)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            # Contiguous for fully_shard, unlike weights in channels_last.
            tensor.data = tensor.data.to(device).contiguous()


def _set_prefetch(modules: list[FSDPModule], options: UnitOptions) -> None:
    """Gather the next ``n`` units early, in registration order (forward) or reversed (backward)."""
    for index, module in enumerate(modules):
        if options.forward_prefetch:
            ahead = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch(ahead)
        if options.backward_prefetch:
            before = modules[max(0, index - options.backward_prefetch) : index]
            module.set_modules_to_backward_prefetch(before[::-1])
