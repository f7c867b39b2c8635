"""Step the masters of a DeepSpeed engine with one optimizer or with several, and list the live tensors of a fit.

For several optimizers DeepSpeed has a carrier over all parameters that steps nothing. The reduced gradients are taken
out of it, and the user's optimizers step full parameters at their owners (`OwnerSteps`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_shard.engines.memory_breakdown import Resident, buffers, memory_of, optimizer_tensors, tensors_in
from lightning_shard.engines.owner_steps import OwnerSteps, Shard
from lightning_shard.engines.zero import flat_layout, swapping
from lightning_shard.engines.zero.running_engine import RunningEngine
from lightning_shard.engines.zero.unused_parameters import UnusedParameters
from lightning_shard.engines.zero.values import ParameterValues
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.names import parameter_names


class ParameterCarrier(SGD):
    """Holds the parameters of several optimizers, group by group, and steps nothing."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """ConfigurationError: a parameter is in two of ``optimizers``."""
        groups = [{"params": list(group["params"])} for optimizer in optimizers for group in optimizer.param_groups]
        try:
            super().__init__(groups, lr=0.0)
        except ValueError as error:
            raise ConfigurationError(
                "configure_optimizers returns optimizers that share parameters, whose gradients and state ZeRO keeps "
                f"once ({error}). Give each parameter to one optimizer, or use shard_fsdp."
            ) from error

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the new values are written before DeepSpeed casts and gathers them."""


class FlatTensors:
    """The live tensors of a fit, see `Engine`. Subclasses step. All ranks call its methods, in one order."""

    def __init__(
        self,
        module: nn.Module,
        running: RunningEngine,
        values: ParameterValues,
        unused: UnusedParameters,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Ranks of ``group`` own full parameters."""
        self.running, self.values, self.unused = running, values, unused
        self._module, self._group, self._device = module, group, device
        self._owner_steps: dict[Optimizer, OwnerSteps] = {}  # Of each optimizer that steps full parameters.
        self._stepped: set[Optimizer] = set()  # Optimizers that have stepped since their last ``zero_grad``.
        # Listed before any forward. A parameter that is read off a module in the middle of its forward is gathered by
        # stage 3, which then takes it for a parameter of that module.
        self._parameters: list[Tensor] = list(module.parameters())
        self.closing = ExitStack()

    def _step_by_owners(self, optimizer: Optimizer, shards: Iterable[Shard], step: Callable[..., Any]) -> None:
        group, device = self._group, self._device
        self._owner_steps[optimizer] = OwnerSteps(optimizer, [*shards], step=step, group=group, device=device)

    def _replace_zero_grad(self, optimizer: Optimizer, drop: Callable[[], None]) -> None:
        """Let the optimizer's ``zero_grad`` drop its gradients. Their memory on the host stays in use."""

        def zero_grad(set_to_none: bool = True) -> None:
            drop()
            self._stepped.discard(optimizer)

        vars(optimizer)["zero_grad"] = zero_grad
        self.closing.callback(vars(optimizer).pop, "zero_grad")

    def _check_dropped(self, optimizer: Optimizer) -> None:
        """Refuse a step or a backward pass that would use gradients of the optimizer's last step again."""
        if optimizer in self._stepped:
            raise ConfigurationError(
                f"zero_grad of {type(optimizer).__name__} was not called since its last step: torch would use that "
                "step's gradients again, but DeepSpeed has dropped them, and sees neither module.zero_grad() nor "
                "parameter.grad = None. Call optimizer.zero_grad() after each step, or use shard_ddp or shard_fsdp."
            )

    def optimizers(self) -> Sequence[AnyOptimizer]:
        assert self.running.optimizer is not None
        flat = FlatOptimizer(optimizer=self.running.optimizer, groups=self.running.groups)
        return [owner_steps.as_owned_optimizer() for owner_steps in self._owner_steps.values()] or [flat]

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        if optimizer in self._owner_steps:
            return self._owner_steps[optimizer].stepped_parameters()
        return [(m.fqn, group.flat) for group in self.running.groups for m in group.members if m.stepped]

    def share_state(self) -> None:
        for owner_steps in self._owner_steps.values():
            owner_steps.share_state()

    def accumulated(self) -> Mapping[str, LiveTensor]:
        names: dict[Tensor, str] = {p: n for p, n in parameter_names(self._module).items() if p.requires_grad}
        return dict(flat_layout.accumulated_gradients(self.running.zero, self.running.groups, names))

    def memory_breakdown(self) -> Iterator[Resident]:
        """See `Engine`. Tensors in files are those mapped between steps."""
        zero, parameters, device = self.running.zero, self._parameters, self._device
        stage_3 = self.running.stage == 3
        for parameter in parameters:
            yield from _parameter_memory(parameter, device=device, offloaded=stage_3 and zero.offload_param)
        stepping = "host" if flat_layout.steps_on_host(zero) else "device"
        flats = list(flat_layout.flat_masters(zero))
        memories = {id(flat): "nvme" if swapping.is_swapped(zero, i) else stepping for i, flat in enumerate(flats)}
        yield from (Resident("masters", memories[id(flat)], flat) for flat in flats)
        yield from (Resident("masters", "host", part.data) for part in self.values.kept.values())
        yield from (Resident("gradients", "device", p.grad) for p in parameters if p.grad is not None)
        # Full, sharded, or a buffer of accumulated shards, by the kind of DeepSpeed's optimizer.
        buffered = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
        for tensor in tensors_in([getattr(zero, name, None) for name in buffered]):
            yield Resident("gradients", stepping, tensor)
        yield from (Resident("gradients", stepping, flat.grad) for flat in flats if flat.grad is not None)
        yield from optimizer_tensors([zero.optimizer], lambda stepped, _: memories.get(id(stepped), stepping))
        yield from buffers(self._module, device=device)
        yield from _staging_memory(zero, parameters, device=device)

    def unsharded(self) -> Iterable[Resident]:
        return (Resident("gathered", "device", p.data) for p in self._parameters if flat_layout.is_partitioned(p))


class OneOptimizerSteps(FlatTensors):
    """Steps one optimizer, by DeepSpeed on flat partitions, or on full parameters."""

    def __init__(self, *parts: Any, whole_step: Callable[..., Any] | None, **places: Any) -> None:
        """``whole_step``: the optimizer's own step, on full parameters. None: DeepSpeed steps."""
        super().__init__(*parts, **places)
        assert self.running.optimizer is not None
        self._optimizer = self.running.optimizer
        if whole_step is not None:
            shards = flat_layout.stepped_shards(self.running.zero, self.running.groups)
            self._step_by_owners(self._optimizer, map(self.unused.with_gradient, shards), whole_step)
        self._replace_zero_grad(self._optimizer, self._refuse_drop)

    def _refuse_drop(self) -> None:
        """ConfigurationError: no step has used the gradients that ``zero_grad`` is to drop."""
        if self.running.pending:
            raise ConfigurationError(
                "zero_grad was called between a backward pass and the optimizer's step, but DeepSpeed has reduced the "
                "gradients by then and can't drop them. Call it after the step."
            )

    def check_backward(self) -> None:
        self._check_dropped(self._optimizer)

    def gradient(self, fqn: str, parameter: Tensor) -> FlatTensor | None:
        return flat_layout.gradient_of(self.running.zero, self.running.groups, fqn) if self.running.pending else None

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        groups = range(len(self.running.groups)) if self.running.pending else ()
        return [part for index in groups for part in flat_layout.gradient_parts(self.running.zero, index)]

    def collect_gradients(self) -> None:
        """At an accumulation boundary: complete the reduction."""
        self.running.complete_gradients()
        if self.unused.automatic:
            self.unused.end_step()

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        if not self.unused.automatic:  # Each backward pass may be over a part of the model.
            self.unused.end_step()
        self._check_dropped(self._optimizer)
        self._stepped.add(self._optimizer)
        if self.running.pending and not skip:
            for owner_steps in self._owner_steps.values():
                owner_steps.step_parameters(**kwargs)
        self.running.step_masters(skip=skip)


class SeveralOptimizerSteps(FlatTensors):
    """Steps several optimizers, each on full parameters."""

    def __init__(self, *parts: Any, optimizers: Sequence[Optimizer], **places: Any) -> None:
        """Give each of the user's ``optimizers`` its shards. The engine was started with a `ParameterCarrier`."""
        super().__init__(*parts, **places)
        groups, names = self.running.groups, parameter_names(self._module)
        # FQN to this rank's shard of a reduced gradient, until its optimizer's ``zero_grad``.
        self._held: dict[str, Tensor] = {}
        self._members = {m.fqn: m for flat in groups for m in flat.members if m.stepped}
        shards = {shard.fqn: shard for shard in flat_layout.stepped_shards(self.running.zero, groups)}
        self._own: dict[Optimizer, list[str]] = {}
        for optimizer in optimizers:
            own = [
                replace(shards[fqn], group=settings, tensor=parameter, gradient=partial(self._held.get, fqn))
                for settings in optimizer.param_groups
                for parameter in settings["params"]
                if (fqn := names[parameter]) in shards
            ]
            self._own[optimizer] = [shard.fqn for shard in own]
            self._step_by_owners(optimizer, own, optimizer.step)
            self._replace_zero_grad(optimizer, partial(self._drop, self._own[optimizer]))

    def check_backward(self) -> None:
        """Allow gradients of earlier steps: each optimizer's are kept until its ``zero_grad``, as in torch."""

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Move the gradients of all backward passes so far out of DeepSpeed."""
        if not self.running.pending:
            return
        self.running.complete_gradients()
        used = self.unused.take_used()
        for shard in flat_layout.stepped_shards(self.running.zero, self.running.groups):
            if shard.fqn in used and (gradient := shard.gradient()) is not None:
                held = self._held.get(shard.fqn)
                # In stage 3 the zeros of a group without any gradient have the compute dtype.
                gradient = gradient.to(shard.value().dtype, copy=held is None)
                self._held[shard.fqn] = gradient if held is None else held.add_(gradient)
        self.running.step_masters(skip=True)
        # Sums on the host of stages 1 and 2, to which micro-batches add even if the first one had no gradient.
        for held_sum in getattr(self.running.zero, "accumulated_grads_in_cpu", {}).values():
            held_sum.zero_()

    def _drop(self, fqns: Iterable[str]) -> None:
        self.collect_gradients()
        for fqn in fqns:
            self._held.pop(fqn, None)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [self._held[fqn] for fqn in self._own[optimizer] if fqn in self._held]

    def gradient(self, fqn: str, parameter: Tensor) -> FlatTensor | None:
        self.collect_gradients()
        if fqn not in self._held:
            return None
        member, held = self._members[fqn], self._held[fqn]
        return FlatTensor(member.shape, held.dtype, [FlatSlice(data=held, start=member.start)])

    def step_optimizer(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        self._check_dropped(optimizer)
        self._stepped.add(optimizer)
        if skip:
            return
        self.collect_gradients()
        self._owner_steps[optimizer].step_parameters(**kwargs)
        self.running.refresh_parameters()


def _parameter_memory(parameter: Any, *, device: torch.device, offloaded: bool) -> Iterator[Resident]:
    if not flat_layout.is_partitioned(parameter):
        yield Resident("parameters", memory_of(parameter, device), parameter)
        return
    in_file = parameter.ds_tensor.final_location == swapping.IN_FILES
    memory = "nvme" if in_file else "host" if offloaded else "device"
    yield Resident("parameters", memory, swapping.live_shard(parameter))
    if parameter.ds_secondary_tensor is not None:
        # hpZ's copy of the shard, over fewer ranks.
        yield Resident("parameters", memory, parameter.ds_secondary_tensor)
    # Empty while the parameter is not gathered.
    yield Resident("gathered", "device", parameter.data)


def _staging_memory(zero: Any, parameters: Iterable[Any], *, device: torch.device) -> Iterator[Resident]:
    """All other tensors of DeepSpeed's optimizer: buckets, and buffers between host, device and files."""
    swappers = {id(s): s for p in parameters if (s := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        for tensor in tensors_in([swapper.buffers, swapper.partitioned_swap_buffer]):
            yield Resident("communication", "host", tensor)
    if swapping.swaps_optimizer(zero):
        for tensor in tensors_in(zero.optimizer_swapper.swap_buffer_manager.all_buffers):
            yield Resident("communication", "host", tensor)
    for name, value in vars(zero).items():
        # On a CPU only the name tells DeepSpeed's buffers on the host from others.
        on_host = "cpu" in name or "pin_buffer" in name
        for tensor in tensors_in(value):
            yield Resident("communication", "host" if on_host else memory_of(tensor, device), tensor)
