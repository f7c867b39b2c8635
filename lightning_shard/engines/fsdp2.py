"""FSDP2 over a module tree, and the engine around it that `fully_shard` and `replicate` share.

The order in `shard` matters: activation checkpointing wraps a unit's forward, compilation takes the checkpointed
forward whole, and FSDP's hooks lie outside of both, so that a unit is gathered once for a recomputing backward and
no graph holds a collective. Both act on ``module.forward``, so that no FQN gains a prefix.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.engines import earlier_parameters, forward, refusals
from lightning_shard.engines._dtensors import answer_in_full
from lightning_shard.engines._fsdp2 import dtypes_of, hook_gathered, hooks_of, leave_inputs_alone, put_hooks, units_of
from lightning_shard.engines.engine import Run
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.own_parameters import StepsOwnParameters
from lightning_shard.engines.replicated import average_gradients, broadcast_from_rank_0, step_apart_from_shards
from lightning_shard.engines.transforms import ForwardOptions, find_transforms
from lightning_shard.engines.units import Unit, UnitSpec, computes, find_units, ignored_parameters, unit_rules
from lightning_shard.engines.usage import SameUnits, UnitUsage
from lightning_shard.engines.whole_steps import Shard, WholeSteps, needs_of
from lightning_shard.engines.written import WrittenInSteps, assign_in_place
from lightning_shard.errors import ConfigurationError, PrecisionError, WrappingError
from lightning_shard.mesh import SHARD
from lightning_shard.precision import casting
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import Accumulated
from lightning_shard.tensors.names import parameter_names

FORWARD_METHODS = ("encode", "generate")  # Methods that run a model without ``forward``, by the names that are common.

_STATE = "_shard_state"
"""Where a module keeps what it was sharded with (mesh, policy, settings), and the trainable parameters that FSDP leaves
alone, so that another Trainer can go on with it."""

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


class FSDP2Engine(StepsOwnParameters):
    """See `lightning_shard.engines.engine.Engine`; a subclass says how one unit is made."""

    name: str
    strategy: str  # Name of the strategy's class, for messages.
    replicates = False
    gathers_in_forward = True

    def __init__(
        self, options: Any, forward: ForwardOptions, *, at_boundary: bool, units: UnitOptions | None = None
    ) -> None:
        """``units``: of the shard units, where ``options`` are not these."""
        super().__init__(options, forward, at_boundary=at_boundary)
        self._units: UnitOptions = units or options
        self._usage: UnitUsage | None = None

    @abstractmethod
    def _applier(self, run: Run) -> ApplyUnit:
        """How the modules of one unit become FSDP modules."""

    def units(self, module: nn.Module) -> list[Unit]:
        return find_units(module, self._units.units)

    def ignored_modules(self) -> Sequence[str]:
        return self._units.ignored_modules

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        self._module, self._run = module, run
        # One process alone has nothing to wait for, and there the batch at a boundary may have no loss.
        self._at_boundary &= run.planned.ranks > 1
        earlier = module.__dict__.get(_STATE)
        earlier_parameters.remember(module)
        refusals.refuse_sharded(module, self.strategy, by_fsdp=False)
        if run.fitting:
            refusals.refuse_double(module)
            _, ignored = ignored_parameters(module, self._units.ignored_modules)
            refusals.refuse_kinds(module, self.strategy, ignored=ignored())
        # What is not in the sharded module itself may differ.
        own = {name: v for name, v in self.settings().items() if name not in ("at_boundary", "forward_methods", "mesh")}
        made_for = (run.mesh, run.policy, own)
        # It stays sharded, so that it can be evaluated or fitted again.
        self._closing.callback(forward.reshard, module)
        self._closing.callback(assign_in_place())
        self._closing.callback(answer_in_full())
        if earlier is not None:
            if earlier[0] != made_for:
                raise ConfigurationError(
                    "The module was sharded by an earlier run of another strategy, precision or set of options, and "
                    "its parameters can't be put together in place. Build a new module, and load the earlier one's "
                    "checkpoint with ckpt_path."
                )
            self._ignored = earlier[1]
            forward.reshard(module)
            self._watch_steps(module)
            return module
        hooks = {name: hooks_of(p) for name, p in module.named_parameters()}
        self._shard(module, run)
        for name, parameter in module.named_parameters():
            put_hooks(parameter, hooks[name])
        earlier_parameters.follow_in_lists(module)
        module.__dict__[_STATE] = made_for, self._ignored
        self._watch_steps(module)
        forward.install_runner(module)
        forward.patch_methods(module, self._units.forward_methods)
        return module

    def _shard(self, root: nn.Module, run: Run) -> None:
        """Shard ``root`` in place over the run's mesh. Collective: all ranks call it.

        A rank has its shards and at most one full unit at any time; of a model on the host that holds for the device.
        Values of rank 0 win. A tree in which the user already applied ``fully_shard`` keeps its units. In manual
        optimization each child of ``root`` is a unit too, as each backward pass of a step may be over a part of the
        model. WrappingError, MaterializationError and PrecisionError come before anything was changed.
        """
        policy, found = run.policy, self._chosen_units(root, run)
        ignored_modules, ignored = ignored_parameters(root, self._units.ignored_modules)
        transforms = find_transforms(root, found, self._forward_options)
        materializer = Materializer(root, device=run.device, seed=run.seed)
        dtypes = computes(found, policy.compute)
        # First, so that what checkpointing runs again in backward has the casts in it.
        _cast(root, policy, dtypes, ignored_modules)
        transforms()
        self._make_units(root, found, run, dtypes, ignored, _preparation(materializer, device=run.device))
        # Read after it, because it replaces parameters.
        self.upcast = casting.cast_trainable_parameters(root, policy.master)
        forward.gather_on_read(root)
        made = units_of(root)
        for unit in made:
            vars(unit)["__deepcopy__"] = partial(refusals.refuse_copy, self.strategy)
        for below_root in made[1:]:
            leave_inputs_alone(below_root)
        _set_prefetch(made[1:], self._units)
        self._ignored = [p for p in ignored() if p.requires_grad]

    def _chosen_units(self, root: nn.Module, run: Run) -> list[Unit]:
        """The units that configure_model made, else those of the settings."""
        found = _users_units(root, run.policy)
        if found is None:
            return find_units(root, self._units.units, with_children=not run.automatic)
        if any(rule.special for rule in unit_rules(self._units.units)):
            raise WrappingError(
                "units has entries with settings of their own, but configure_model applied fully_shard, whose units "
                "stay. Pass these settings there, or leave the sharding to the strategy."
            )
        return found

    def _make_units(
        self,
        root: nn.Module,
        found: Sequence[Unit],
        run: Run,
        dtypes: Mapping[nn.Module, torch.dtype],
        ignored: Callable[[], Collection[nn.Parameter]],
        prepare: Callable[[tuple[nn.Module, ...]], None],
    ) -> None:
        """Make an FSDP module of each unit, innermost first, and of ``root`` at last."""
        apply, children = self._applier(run), set(root.children())

        def make(modules: tuple[nn.Module, ...], reshard: bool | int | None, compute: torch.dtype) -> None:
            apply(
                modules[0] if len(modules) == 1 else list(modules),
                reshard_after_forward=reshard,
                # Given in fp32 too: a frozen parameter in another dtype is then seen in fp32. Inputs are cast by
                # `install_casts`, which knows a batch's targets from a module's inputs.
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=compute, reduce_dtype=run.policy.reduce, cast_forward_inputs=False
                ),
                ignored_params=set(ignored()) or None,
            )

        for unit in found:
            prepare(unit.modules)
            if isinstance(unit.modules[0], FSDPModule):
                continue
            outermost = not run.automatic and children.issuperset(unit.modules)
            own = unit.rule.reshard_after_forward
            reshard = False if outermost else self._units.reshard_after_forward if own is None else own
            make(unit.modules, reshard, dtypes[unit.modules[0]])
        prepare((root,))
        if not isinstance(root, FSDPModule):
            # None: torch keeps the root gathered between forward and backward, whatever the units do.
            make((root,), None, run.policy.compute)

    def _watch_steps(self, module: nn.Module) -> None:
        self._written = WrittenInSteps(module)
        self._shards = [p for p in module.parameters() if isinstance(p, DTensor)]
        self._closing.callback(self._written.close)
        self._begun = False
        self._same_units = SameUnits((n, m) for n, m in module.named_modules() if isinstance(m, FSDPModule))
        self._closing.callback(self._same_units.close)

    def engage(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        engaged = super().engage(optimizers)
        self._whole = {}
        for optimizer in optimizers:
            if self.needs(optimizer).full:
                self._whole[id(optimizer)] = _whole_steps(optimizer, self._module, self._run)
            elif self._ignored:
                self._closing.callback(step_apart_from_shards(optimizer))
        self.steps_itself |= bool(self._whole)
        full = [optimizer for optimizer in optimizers if id(optimizer) in self._whole]
        self._closing.callback(refusals.refuse_new_groups(full, self.strategy))
        self._look_at_usage()
        return engaged

    def _look_at_usage(self) -> None:
        if self._usage is not None:
            self._usage.close()
        # In manual optimization each backward pass is over a part of the model.
        if self._run.fitting and self._run.automatic:
            always, compiled = self._units.find_unused_parameters, self._forward_options.compile
            self._usage = UnitUsage(self._module, always=always, compiled=compiled)
            self._closing.callback(self._usage.close)

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # What is gathered for the first time is made. One rank alone may have hooks, and all gather.
        if not self._begun and any(Ranks.of().gather(any(map(hooks_of, self._shards)))):
            forward.gather_each(self._module)
        self._begun = True
        self._hook_gathered()
        return self.evaluate(step, *args, **kwargs)

    def _hook_gathered(self) -> None:
        if any(map(hooks_of, self._shards)):
            hook_gathered(self._module)

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Ranks that run different units learn it before they meet in anything else.
            with self._same_units.step(), casting.scalars_rounded(self._module, self._run.policy.compute):
                output = step(*args, **kwargs)
            self._written.take_over()
            if self._usage is not None:
                self._usage.watch(self._module)
            return output

        # A gradient that is taken inside of the step may be taken of again, for which the units have to be there.
        self._reshard_after_backward(False)
        try:
            with refusals.explained(self.strategy):
                return forward.run(self._module, run, *args, **kwargs)
        finally:
            self._reshard_after_backward(True)

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        self._hook_gathered()
        if not self._run.automatic:
            # It starts inside the step, before FSDP saw the step's output, and a root without units below it would
            # never reduce its gradients. The loss is no argument: FSDP would hook a copy of it.
            forward.run(self._module, lambda: loss)
            self._reshard_after_backward(True)
        with refusals.explained(self.strategy):
            call(loss)
        if self._usage is not None:
            self._usage.after_backward()
        if not self._run.automatic:
            self._reshard_after_backward(False)

    def _reshard_after_backward(self, enabled: bool) -> None:
        assert isinstance(self._module, FSDPModule)
        self._module.set_reshard_after_backward(enabled)

    def sync_gradients(self, enabled: bool) -> None:
        assert isinstance(self._module, FSDPModule)
        if self._at_boundary:
            self._module.set_requires_gradient_sync(enabled)
            if enabled and self._usage is not None:
                self._usage.after_micro_batch()

    def accumulated(self, begin: Collection[str] = ()) -> Mapping[str, Accumulated]:
        if begin:
            # Before its first pass FSDP has not seen which parameters were cast, and has no full ones.
            forward.gather_each(self._module)
        found = super().accumulated(begin)
        return found if self._usage is None else self._usage.usage.so_far(found, begin)

    def finish_gradients(self) -> None:
        with self._run.watch():
            average_gradients(self._ignored, reduce_dtype=self._run.policy.reduce)
        if self._usage is not None:
            self._usage.finish()

    def follow_freezing(self) -> nn.Module:
        if full := [o for o in self._optimizers if id(o) in self._whole or needs_of(o, self._run).full]:
            raise ConfigurationError(
                f"Parameters were frozen or thawed after the fit began, but {type(full[0]).__qualname__} steps full "
                "parameters at owners that were chosen then. Freeze before the fit, or use shard_ddp in '32-true'."
            )
        # FSDP reads `requires_grad` whenever it gathers.
        self._look_at_usage()
        return self._module

    def before_reading(self) -> None:
        forward.reshard(self._module)
        casting.round_scalars_again()


def _cast(
    root: nn.Module, policy: PrecisionPolicy, own: Mapping[nn.Module, torch.dtype], ignored: Collection[nn.Module]
) -> None:
    """Have the tree compute in the policy's dtype, and units in their own; what is ignored in fp32 if all else is."""
    if {policy.compute, *own.values()} == {torch.float32}:
        for module in ignored:
            casting.compute_in(module, torch.float32)
        return
    casting.install_casts(root, policy.compute, inside=own, whole=ignored, output=policy.output, float8=policy.float8)
    casting.round_scalars(root, policy.compute, own)


def _whole_steps(optimizer: Optimizer, root: nn.Module, run: Run) -> WholeSteps:
    names = parameter_names(root)
    stepped = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return WholeSteps(
        optimizer,
        [_shard_of(names[p], p, group) for p, group in stepped if isinstance(p, DTensor)],
        replicated=[(names[p], p, group) for p, group in stepped if not isinstance(p, DTensor)],
        step=optimizer.step,
        group=run.mesh[SHARD].get_group(),
        device=run.device,
    )


def _shard_of(fqn: str, parameter: DTensor, group: dict[str, Any]) -> Shard:
    def gradient() -> Tensor | None:
        found: Any = parameter.grad
        return found.to_local().view(-1) if isinstance(found, DTensor) else None

    return Shard(
        fqn=fqn,
        shape=parameter.shape,
        value=lambda: parameter.to_local().detach().view(-1),
        gradient=gradient,
        group=group,
        tensor=parameter,
    )


def _users_units(root: nn.Module, policy: PrecisionPolicy) -> list[Unit] | None:
    """The modules below ``root`` that the user applied ``fully_shard`` to, inner before outer; None: to none.
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


def _preparation(materializer: Materializer, *, device: torch.device) -> Callable[[tuple[nn.Module, ...]], None]:
    """A function that gives the modules below some tops, but for those done before, their device and full values."""
    done: set[nn.Module] = set()

    def prepare(tops: tuple[nn.Module, ...]) -> None:
        inside = {m for top in tops for m in top.modules()} - done
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
