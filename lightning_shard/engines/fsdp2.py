"""The engine over FSDP2 modules that `fully_shard` and `replicate` share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.engines import dtensor_refusals, forward, module_checks, optimizer_remap, unsharding
from lightning_shard.engines._fsdp2 import Units, begin_sums, reduce_always, reduction_dtypes, units_of, watch_gradients
from lightning_shard.engines.engine import Run
from lightning_shard.engines.external_writes import ExternalWriteCheck, assignable_data, check_gathered
from lightning_shard.engines.owner_steps import OwnerSteps, Shard, needs_of
from lightning_shard.engines.parameter_use import TRAINING, ParameterUse
from lightning_shard.engines.replicated import average_gradients
from lightning_shard.engines.sharding import ApplyUnit, UnitOptions, shard_tree
from lightning_shard.engines.torch_optimizer_engine import TorchOptimizerEngine
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.units import Unit, find_units, ignored_parameters
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import SHARD
from lightning_shard.tensors.flat import local
from lightning_shard.tensors.full import scatter_full
from lightning_shard.tensors.names import parameter_names

_STATE = "_shard_state"
"""Attribute of a module with its mesh, policy and settings, and its ignored parameters, for the next Trainer."""


class FSDP2Engine(TorchOptimizerEngine):
    """See `lightning_shard.engines.engine.Engine`. A subclass makes one unit of modules."""

    name: str
    strategy: str  # The strategy's class name, for messages.
    replicates = False
    gathers_in_forward = True

    _module: Any  # An FSDP module after `prepare`.

    def __init__(
        self, options: Any, forward: ForwardOptions, *, at_boundary: bool, units: UnitOptions | None = None
    ) -> None:
        """``units``: options of the shard units, by default ``options`` itself."""
        super().__init__(options, forward, at_boundary=at_boundary)
        self._units: UnitOptions = units or options
        self._compared: dict[nn.Parameter, str] = {}  # Trainable parameters, if ranks compare their use.
        self._writes: ExternalWriteCheck | None = None

    @abstractmethod
    def _applier(self, run: Run) -> ApplyUnit:
        """The function that makes FSDP modules of one unit's modules."""

    def units(self, module: nn.Module) -> list[Unit]:
        return find_units(module, self._units.units)

    def ignored_modules(self) -> Sequence[str]:
        return self._units.ignored_modules

    def prepare(self, module: nn.Module, run: Run) -> nn.Module:
        self._module, self._run = module, run
        # A single process has nothing to reduce, and its batch at a boundary may have no loss.
        self._at_boundary &= run.planned.ranks > 1
        earlier = module.__dict__.get(_STATE)
        unsharding.unguard_module(module)
        optimizer_remap.remember_parameters(module)
        module_checks.refuse_sharded(module, self.strategy, by_fsdp=False)
        if run.fitting:
            module_checks.refuse_double(module, self.strategy, run.policy.compute)
            _, ignored = ignored_parameters(module, self._units.ignored_modules)
            left = ignored()
            module_checks.refuse_kinds(module, self.strategy, ignored=left)
            hooked: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p not in left}
            module_checks.refuse_hooks(hooked, self.strategy, module_checks.BEFORE_SHARDING)
        module_checks.refuse_lists(module, self.strategy)
        # These settings change nothing in the sharded module itself.
        free = ("at_boundary", "forward_methods", "mesh")
        own = {name: value for name, value in self.resolved_config().items() if name not in free}
        made_for = (run.mesh, run.policy, own)
        # The module stays sharded after the run, for further fits and evaluations.
        self._closing.callback(unsharding.guard_module, module)
        self._closing.callback(lambda: Units(units_of(module)).reshard())
        self._closing.enter_context(assignable_data())
        self._closing.callback(dtensor_refusals.install_refusals())
        if earlier is not None and earlier[0] != made_for:
            raise ConfigurationError(
                "The module was sharded by an earlier run of another strategy, precision or set of options, and its "
                "parameters stay so. Make it plain with lightning_shard.unshard(module), or build a new one and load "
                "the earlier one's checkpoint with ckpt_path."
            )
        self._ignored: list[nn.Parameter] = [] if earlier is None else earlier[1]
        if earlier is None:
            self.upcast, self._ignored = shard_tree(module, run, self._units, self._forward_options, self._applier(run))
            for part in module.modules():
                part.register_load_state_dict_pre_hook(_take_full)
        self._averaged, self._unaveraged = dict[nn.Parameter, None](), set[Tensor]()
        self._follow_ignored()
        module.__dict__[_STATE] = made_for, self._ignored
        self._made = Units(units_of(module))
        self._made.reshard()
        self._shards = {p: fqn for p, fqn in parameter_names(module).items() if isinstance(p, DTensor)}
        if run.fitting:
            self._writes = check_gathered(self.strategy, module, self._shards)
            self._closing.callback(self._writes.end_check)
        units = set(units_of(module))
        self._use = ParameterUse((n, m) for n, m in module.named_modules() if m in units)
        self._closing.callback(self._use.remove_hooks)
        if earlier is None:
            forward.patch_methods(module, self._units.forward_methods)
        return module

    def _follow_ignored(self) -> None:
        # Several optimizers may step at one boundary, and gradients that one has clipped are averaged already.
        for parameter in [p for p in self._ignored if p.requires_grad and p not in self._averaged]:
            self._averaged[parameter] = None
            self._closing.callback(parameter.register_post_accumulate_grad_hook(self._unaveraged.add).remove)

    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], Any]:
        attached = super().attach_optimizers(optimizers)
        self._owner_steps = {}
        for optimizer in optimizers:
            if self.needs(optimizer).full:
                self._owner_steps[id(optimizer)] = _make_owner_steps(optimizer, self._module, self._run)
        # An optimizer that computes the loss again can't be stepped after backward.
        self._mixes_shards = bool(self._ignored) and not any(needs.again for needs in self._needs.values())
        self.steps_itself |= bool(self._owner_steps) or self._mixes_shards
        full = [optimizer for optimizer in optimizers if id(optimizer) in self._owner_steps]
        self._closing.callback(module_checks.refuse_new_groups(full, self.strategy))
        # Not in manual optimization, whose backward passes may each reach only a part of the model.
        if self._run.automatic:
            self._closing.callback(watch_gradients(self._module, self._note_use))
            reduce_always(self._module, True)
            self._closing.callback(reduce_always, self._module, False)
            self._compare_use()
        return attached

    def _note_use(self, parameter: nn.Parameter) -> None:
        if (fqn := self._compared.get(parameter)) is not None:
            self._use.used_in_step[fqn] = None

    def _compare_use(self) -> None:
        self._compared = {p: fqn for p, fqn in parameter_names(self._module).items() if p.requires_grad}
        self._use.compare_parameters(self._compared.values(), always=self._units.find_unused_parameters)

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module_checks.refuse_hooks(self._shards, self.strategy, module_checks.OF_SHARDS)
        with self._foreign_steps.watch_forward():
            output = self._run_step(TRAINING, step, *args, **kwargs)
        if not self._run.automatic or output is None:
            self._made.reshard()  # No backward pass follows, which would do so.
        return output

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self._run_step("evaluation", step, *args, **kwargs)
        self._made.reshard()
        return output

    def _run_step(self, kind: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Ranks that run different units detect it before any other collective.
            with self._use.watch_forward(kind):
                output = step(*args, **kwargs)
            # While the step's parameters are gathered.
            if self._writes is not None and torch.is_grad_enabled():
                self._writes.refuse_writes(together=True)
                self._writes.end_step()
            return output

        # Gradients that the step takes inside forward may be differentiated again, so their units stay gathered.
        forward.clear_taken_gradients(self._module)
        self._made.reshard_after_backward(False)
        try:
            with module_checks.explain_ungathered(self.strategy):
                return forward.run_as_forward(self._module, run, *args, **kwargs)
        finally:
            self._made.reshard_after_backward(True)

    def backward(self, loss: Tensor, call: Callable[[Tensor], None], *, overridden: bool, **kwargs: Any) -> None:
        if isinstance(loss, DTensor):
            raise module_checks.not_gathered(self.strategy)  # Its gradients would not be averaged.
        if not self._run.automatic:
            # Backward starts inside the step, before FSDP saw the step's output, and a root without other units
            # would never reduce its gradients. The loss is not an argument, because FSDP would hook a copy of it.
            forward.run_as_forward(self._module, lambda: loss)
            self._made.reshard_after_backward(True)
            frozen = [p for p in self._shards if not p.requires_grad and p.grad is None]
        with module_checks.explain_ungathered(self.strategy), forward.gathered_for_gradients(self._module):
            call(loss)
        if not self._run.automatic:
            self._made.reshard_after_backward(False)
            # `toggle_optimizer` freezes shards in the step, but not parameters that were gathered before.
            for parameter in frozen:
                parameter.grad = None

    def sync_gradients(self, enabled: bool) -> None:
        if self._at_boundary:
            self._module.set_requires_gradient_sync(enabled)
            if enabled and self._compared:
                # The last micro-batch may use other parameters than those before.
                begin_sums(self._module, self._compared.keys())

    def finish_gradients(self) -> None:
        for parameter in self._unaveraged:
            self._note_use(parameter)  # type: ignore[arg-type]
        average_gradients(self._averaged, reduce_dtype=self._run.policy.reduce, new=self._unaveraged)
        self._unaveraged.clear()
        if self._compared:
            unused = self._use.finish_step()
            for parameter, fqn in self._compared.items() if unused else ():
                if fqn in unused:
                    parameter.grad = None

    def reduction_dtypes(self) -> set[torch.dtype]:
        return reduction_dtypes(self._module) | ({self._run.policy.reduce} if self._averaged else set())

    def follow_freezing(self) -> nn.Module:
        if full := [o for o in self._optimizers if id(o) in self._owner_steps or needs_of(o, self._run).full]:
            raise ConfigurationError(
                f"Parameters were frozen or thawed after the fit began, but {type(full[0]).__qualname__} steps full "
                "parameters at owners that were chosen then. Freeze before the fit, or use shard_ddp in '32-true'."
            )
        # FSDP reads `requires_grad` in each gather. Parameters that were just frozen may have a gradient of this step.
        self._follow_ignored()
        if self._compared:
            self._compare_use()
        return self._module

    def reshard_and_sync_masters(self) -> None:
        self._made.finish_gathers()
        self._made.reshard()


def _take_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, *load: Any) -> None:
    """Let ``load_state_dict`` load full tensors into shards, also after the fit."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value: Any = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and type(value) in (Tensor, nn.Parameter) and value.shape == parameter.shape:
            state_dict[prefix + name] = shard = parameter.detach().clone()
            scatter_full(value.detach(), shard)


def _make_owner_steps(optimizer: Optimizer, root: nn.Module, run: Run) -> OwnerSteps:
    names = parameter_names(root)
    stepped = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return OwnerSteps(
        optimizer,
        [_shard_of(names[p], p, group) for p, group in stepped if isinstance(p, DTensor)],
        replicated=[(names[p], p, group) for p, group in stepped if not isinstance(p, DTensor)],
        step=optimizer.step,
        group=run.mesh[SHARD].get_group(),
        device=run.device,
    )


def _shard_of(fqn: str, parameter: DTensor, group: dict[str, Any]) -> Shard:
    def flat(tensor: Tensor) -> Tensor:
        return local(tensor).detach().view(-1)

    def gradient() -> Tensor | None:
        return None if parameter.grad is None else flat(parameter.grad)

    value = partial(flat, parameter)
    return Shard(fqn=fqn, shape=parameter.shape, value=value, gradient=gradient, group=group, tensor=parameter)
