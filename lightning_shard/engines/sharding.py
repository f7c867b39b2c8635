"""A module tree is sharded with FSDP2, in place.

The order in `shard_tree` matters: activation checkpointing wraps a unit's forward, compilation takes the checkpointed
forward whole, and FSDP's hooks lie outside of both, so that a unit is gathered once for a recomputing backward and
no graph holds a collective. Both act on ``module.forward``, so that no FQN gains a prefix.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard.engines import forward, module_checks
from lightning_shard.engines._fsdp2 import dtypes_of, leave_inputs_alone, round_each_use, units_of
from lightning_shard.engines.engine import Run
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.transforms import ForwardOptions, find_transforms
from lightning_shard.engines.units import Unit, UnitSpec, computes, find_units, ignored_parameters, unit_rules
from lightning_shard.errors import PrecisionError, WrappingError
from lightning_shard.precision import casting
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import warn_on_first_rank
from lightning_shard.tensors.names import compiled_in_place
from lightning_shard.text import listed

FORWARD_METHODS = ("encode", "generate")  # Methods that run a model without ``forward``, by the names that are common.

ApplyUnit = Callable[..., object]
"""``fully_shard``, or what takes its arguments: makes FSDP modules of a unit's module or modules."""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What a user sets about the shard units."""

    units: UnitSpec = "auto"
    reshard_after_forward: bool | int = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    ignored_modules: tuple[str, ...] = ()
    find_unused_parameters: bool = False  # Whether ranks tell each other in every step which parameters they used.
    forward_methods: tuple[str, ...] = FORWARD_METHODS  # What runs a model besides ``forward``.


def shard_tree(
    root: nn.Module, run: Run, options: UnitOptions, transforms: ForwardOptions, apply: ApplyUnit, strategy: str
) -> tuple[Mapping[str, torch.dtype], list[nn.Parameter]]:
    """Shard ``root`` in place over the run's mesh. Collective: all ranks call it.

    A rank has its shards and at most one full unit at any time; of a model on the host that holds for the device.
    Values of rank 0 win. A tree in which the user already applied ``fully_shard`` keeps its units. In manual
    optimization each child of ``root`` is a unit too, as each backward pass of a step may be over a part of the
    model. WrappingError, MaterializationError and PrecisionError come before anything was changed. Returned: the
    loaded dtypes of the parameters whose masters have another, and the parameters that FSDP leaves alone.
    """
    policy, found = run.policy, _chosen_units(root, run, options.units)
    ignored_modules, ignored = ignored_parameters(root, options.ignored_modules)
    transform = find_transforms(root, found, transforms)
    prepare = _preparation(Materializer(root, device=run.device, seed=run.seed), device=run.device)
    dtypes = computes(found, policy.compute)
    # First, so that what checkpointing runs again in backward has the casts in it.
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
            # Given in fp32 too: a frozen parameter in another dtype is then seen in fp32. Inputs are cast by
            # `install_casts`, which knows a batch's targets from a module's inputs.
            mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=policy.reduce, cast_forward_inputs=False),
            ignored_params=set(ignored()) or None,
        )

    for unit in found:
        outermost = not run.automatic and unit.module in children
        own = unit.rule.reshard_after_forward
        reshard = False if outermost else options.reshard_after_forward if own is None else own
        make(unit.module, reshard, dtypes[unit.module])
    # None: torch keeps the root gathered between forward and backward, whatever the units do.
    make(root, None, policy.compute)
    # Read after it, because it replaces parameters.
    upcast = casting.cast_trainable_parameters(root, policy.master)
    forward.gather_for_calls(root)
    made = units_of(root)
    for module in made:
        vars(module)["__deepcopy__"] = partial(module_checks.refuse_copy, strategy)
    round_each_use(root)
    for below_root in made[1:]:
        leave_inputs_alone(below_root, partial(forward.note_gradients, root, below_root))
    _set_prefetch(made[1:], options)
    return upcast, [*ignored()]


def _chosen_units(root: nn.Module, run: Run, spec: UnitSpec) -> list[Unit]:
    """The modules that configure_model applied ``fully_shard`` to, inner before outer, else those of ``spec``."""
    sharded = [(fqn, m) for fqn, m in root.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        if names := compiled_in_place(root):
            warn_on_first_rank(
                f"{listed(names, most=3)} were compiled in place (module.compile()), hooks and all, and are no shard "
                "units: the module around gathers their parameters together. Write module = torch.compile(module), or "
                "compile: true of the strategy, which compiles each unit."
            )
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
    """Have the tree compute in the policy's dtype, and units in their own; what is ignored in fp32 if all else is."""
    if {policy.compute, *own.values()} == {torch.float32}:
        for module in ignored:
            casting.compute_in(module, torch.float32)
        return
    casting.install_casts(root, policy.compute, inside=own, whole=ignored, output=policy.output, float8=policy.float8)


def _preparation(materializer: Materializer, *, device: torch.device) -> Callable[[nn.Module], None]:
    """A function that gives the modules from one on, but for those done before, their device and full values."""
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
        # Its states are neither parameters nor buffers.
        module.to(device)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            # Contiguous, as fully_shard wants it: weights in channels_last are not.
            tensor.data = tensor.data.to(device).contiguous()


def _set_prefetch(modules: list[FSDPModule], options: UnitOptions) -> None:
    """Gather the next ``n`` units early, by registration order (forward) and against it (backward)."""
    for index, module in enumerate(modules):
        if options.forward_prefetch:
            ahead = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch(ahead)
        if options.backward_prefetch:
            before = modules[max(0, index - options.backward_prefetch) : index]
            module.set_modules_to_backward_prefetch(before[::-1])
