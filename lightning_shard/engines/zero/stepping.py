"""Stepping the masters of a DeepSpeed engine with one optimizer, or with several, and the live tensors of that.

One is stepped by DeepSpeed, on flat partitions, or ahead of it on full parameters. For several DeepSpeed is given an
optimizer that steps nothing, over all parameters. What it reduces is taken out of it at an accumulation boundary; the
user's optimizers step full parameters at their owners (`WholeSteps`), and DeepSpeed casts and gathers what they wrote.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_shard.engines.memory_breakdown import Resident, buffers, memory_of, optimizer_tensors, tensors_in
from lightning_shard.engines.parameter_use import ParameterUse
from lightning_shard.engines.whole_steps import Shard, WholeSteps
from lightning_shard.engines.zero import layout, running, swapping
from lightning_shard.engines.zero.running import Running
from lightning_shard.engines.zero.values import Values
from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import wrap
from lightning_shard.tensors.flat import AnyOptimizer, FlatOptimizer, FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.names import parameter_names
from lightning_shard.text import listed


class Carrier(SGD):
    """Has the parameters of several optimizers, group by group, and steps nothing."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the parameters of ``optimizers``; ConfigurationError: one is in two of them."""
        groups = [{"params": list(group["params"])} for optimizer in optimizers for group in optimizer.param_groups]
        given = [id(parameter) for group in groups for parameter in group["params"]]
        if len(set(given)) < len(given):
            raise ConfigurationError(
                "configure_optimizers returns optimizers that share parameters, whose gradients and state ZeRO keeps "
                "once. Give each parameter to one optimizer, or use shard_fsdp."
            )
        super().__init__(groups, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the values are there before DeepSpeed casts and gathers them."""


class FlatTensors:
    """The live tensors of a run whose optimizers step flat partitions, stages 1 to 3 in a fit, and those of its engine:
    an `EngineTensors`, of which the classes below have the rest. All ranks make it and call its methods, in one order.
    """

    def __init__(self, module: nn.Module, started: Running, values: Values, *, device: torch.device) -> None:
        self.running, self.values = started, values
        self._module, self._device = module, device
        self._whole: dict[Optimizer, WholeSteps] = {}  # Of each optimizer that steps full parameters.
        self._stepped: set[Optimizer] = set()  # Those that have stepped since their last ``zero_grad``.
        # Listed while no forward ran: stage 3 gathers what is read off a module in the middle of its forward, and takes
        # it for a parameter that the module needs from then on.
        self._parameters: list[Tensor] = list(module.parameters())
        closing = ExitStack()
        self._closing, self.close = closing, closing.close

    def _take_over_zero_grad(self, optimizer: Optimizer, drop: Callable[[], None]) -> None:
        """Have the optimizer's ``zero_grad`` drop its gradients; the memory that they are offloaded to must stay."""

        def zero_grad(set_to_none: bool = True) -> None:
            drop()
            self._stepped.discard(optimizer)

        vars(optimizer)["zero_grad"] = zero_grad
        self._closing.callback(vars(optimizer).pop, "zero_grad")

    def _check_dropped(self, optimizer: Optimizer) -> None:
        """Refuse a step, or a backward pass, to which gradients of the optimizer's last step belong."""
        if optimizer in self._stepped:
            raise ConfigurationError(
                f"zero_grad of {type(optimizer).__name__} was not called since its last step: torch would add to that "
                "step's gradients, or step on them again, but DeepSpeed has dropped them, and sees neither "
                "module.zero_grad() nor parameter.grad = None. Call optimizer.zero_grad() after each step, or use "
                "shard_ddp or shard_fsdp."
            )

    def masters(self) -> Mapping[str, LiveTensor]:
        return self.values.tensors(self.running)

    def optimizers(self) -> Sequence[AnyOptimizer]:
        assert self.running.optimizer is not None
        flat = FlatOptimizer(optimizer=self.running.optimizer, groups=self.running.groups)
        return [whole.owned() for whole in self._whole.values()] or [flat]

    def stepped_parameters(self, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
        if optimizer in self._whole:
            return self._whole[optimizer].stepped()
        return [(m.fqn, group.flat) for group in self.running.groups for m in group.members if m.stepped]

    def share_state(self) -> None:
        for whole in self._whole.values():
            whole.share_state()

    def accumulated(self) -> Mapping[str, LiveTensor]:
        names: dict[Tensor, str] = {p: n for p, n in parameter_names(self._module).items() if p.requires_grad}
        return dict(layout.accumulated(self.running.zero, self.running.groups, names))

    def memory_breakdown(self) -> Iterator[Resident]:
        """Those in files are the ones mapped between steps."""
        zero, parameters, device = self.running.zero, self._parameters, self._device
        stage_3 = layout.kind(zero) == layout.STAGE_3
        for parameter in parameters:
            yield from _parameter(parameter, device=device, offloaded=stage_3 and zero.offload_param)
        stepping = "host" if layout.is_offloaded(zero) else "device"
        flats = list(layout.flats(zero))
        memories = {id(flat): "nvme" if swapping.is_swapped(zero, i) else stepping for i, flat in enumerate(flats)}
        yield from (Resident("masters", memories[id(flat)], flat) for flat in flats)
        yield from (Resident("masters", "host", part.data) for part in self.values.kept.values())
        yield from (Resident("gradients", "device", p.grad) for p in parameters if p.grad is not None)
        # Full, sharded, or a buffer that accumulates shards: by the kind of DeepSpeed's optimizer.
        buffered = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
        for tensor in tensors_in([getattr(zero, name, None) for name in buffered]):
            yield Resident("gradients", stepping, tensor)
        yield from (Resident("gradients", stepping, flat.grad) for flat in flats if flat.grad is not None)
        yield from optimizer_tensors([zero.optimizer], lambda stepped, _: memories.get(id(stepped), stepping))
        yield from buffers(self._module, device=device)
        yield from _staging(zero, parameters, device=device)

    def unsharded(self) -> Iterable[Resident]:
        return (Resident("gathered", "device", p.data) for p in self._parameters if layout.is_partitioned(p))


class OneOptimizer(FlatTensors):
    """One that DeepSpeed steps on flat partitions, or that is stepped on full parameters."""

    def __init__(
        self, module: nn.Module, started: Running, values: Values, whole: WholeSteps | None, *, device: torch.device
    ) -> None:
        """``whole`` steps the optimizer of ``started`` on full parameters; None: DeepSpeed does on flat partitions."""
        super().__init__(module, started, values, device=device)
        assert started.optimizer is not None
        if whole is not None:
            self._whole[started.optimizer] = whole
        self._optimizer = started.optimizer
        self._take_over_zero_grad(started.optimizer, self._refuse_drop)

    def _refuse_drop(self) -> None:
        """ConfigurationError: the gradients that ``zero_grad`` drops were not stepped on."""
        if self.running.pending:
            raise ConfigurationError(
                "zero_grad was called between a backward pass and the optimizer's step, but DeepSpeed has reduced the "
                "gradients by then and can't drop them. Call it after the step."
            )

    def check_backward(self) -> None:
        self._check_dropped(self._optimizer)

    def gradient(self, fqn: str, parameter: Tensor) -> FlatTensor | None:
        return layout.gradient_of(self.running.zero, self.running.groups, fqn) if self.running.pending else None

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return layout.reduced_gradients(self.running.zero) if self.running.pending else []

    def collect(self) -> None:
        """At an accumulation boundary: complete what backward did not reduce."""
        running.finish_accumulation(self.running)

    def step(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        self._check_dropped(self._optimizer)
        self._stepped.add(self._optimizer)
        if self.running.pending and not skip:
            for whole in self._whole.values():
                whole.step(**kwargs)
        running.step(self.running, skip=skip)


class SeveralOptimizers(FlatTensors):
    """Several, each stepped on full parameters."""

    def __init__(
        self,
        module: nn.Module,
        started: Running,
        values: Values,
        optimizers: Sequence[Optimizer],
        *,
        taken: Callable[[], Set[str]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Give each of the user's ``optimizers`` its shards over ``group``. DeepSpeed was ``started`` over a `Carrier`,
        with stages 1 to 3. ``taken``: FQNs used in backward since its last call.
        """
        super().__init__(module, started, values, device=device)
        self._taken, names = taken, parameter_names(module)
        self._held: dict[str, Tensor] = {}
        """FQN to this rank's shard of a reduced gradient, until its optimizer's ``zero_grad``."""
        self._members = {m.fqn: m for flat in started.groups for m in flat.members if m.stepped}
        shards = {shard.fqn: shard for shard in layout.steps(started.zero, started.groups)}
        self._own: dict[Optimizer, list[str]] = {}
        for optimizer in optimizers:
            own = [
                replace(shards[fqn], group=settings, tensor=parameter, gradient=partial(self._held.get, fqn))
                for settings in optimizer.param_groups
                for parameter in settings["params"]
                if (fqn := names[parameter]) in shards
            ]
            self._own[optimizer] = [shard.fqn for shard in own]
            self._whole[optimizer] = WholeSteps(optimizer, own, step=optimizer.step, group=group, device=device)
            self._take_over_zero_grad(optimizer, partial(self._drop, self._own[optimizer]))

    def check_backward(self) -> None:
        """Nothing: other optimizers' gradients are kept until they are dropped, as torch keeps them."""

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients of the backward passes so far out of DeepSpeed, which then has none."""
        if not self.running.pending:
            return
        running.finish_accumulation(self.running)
        used = self._taken()
        for shard in layout.steps(self.running.zero, self.running.groups):
            if shard.fqn in used and (gradient := shard.gradient()) is not None:
                held = self._held.get(shard.fqn)
                # The zeros of a group without any gradient are in the compute dtype in stage 3.
                gradient = gradient.to(shard.value().dtype, copy=held is None)
                self._held[shard.fqn] = gradient if held is None else held.add_(gradient)
        running.step(self.running, skip=True)
        layout.clear_sums(self.running.zero)

    def _drop(self, fqns: Iterable[str]) -> None:
        self.collect()
        for fqn in fqns:
            self._held.pop(fqn, None)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [self._held[fqn] for fqn in self._own[optimizer] if fqn in self._held]

    def gradient(self, fqn: str, parameter: Tensor) -> FlatTensor | None:
        self.collect()
        if fqn not in self._held:
            return None
        member, held = self._members[fqn], self._held[fqn]
        return FlatTensor(member.shape, held.dtype, [FlatSlice(data=held, start=member.start)])

    def step(self, optimizer: Optimizer, *, skip: bool, **kwargs: Any) -> None:
        """Step one optimizer; forward sees the new values."""
        self._check_dropped(optimizer)
        self._stepped.add(optimizer)
        if skip:
            return
        self.collect()
        self._whole[optimizer].step(**kwargs)
        running.refresh(self.running)


class UnusedParameters:
    """Parameters that no rank uses in a step: torch's DDP leaves them, DeepSpeed steps them with gradients of zero.
    Those that only some ranks use are refused. All ranks make it and call its methods, in one order.
    """

    def __init__(self, use: ParameterUse, started: Running, *, rests: bool, apart: Set[str], repeats: bool) -> None:
        """Compare the ``use`` of parameters ahead of each reduction of ``started``. ``rests``: gradients of zero change
        nothing, or are left out. ``apart``: FQNs that stage 3 reduces in full. ``repeats``: as in `ParameterUse`.
        """
        self._use, self._running, self._rests, self._apart, self._repeats = use, started, rests, apart, repeats
        self._unused: Set[str] = frozenset()
        self._steps, self._keeps, self._closing = 0, False, ExitStack()
        self.close = self._closing.close
        # Sums over micro-batches that lie on the host go into the step with the gradient of the last one, and keep the
        # last step's where the first has none (``async_accumulate_grad_in_cpu_via_gpu``).
        self._first: Set[str] | None = None  # What the first micro-batch of this step has used.
        self._sums_on_host = layout.is_offloaded(started.zero)
        name = "reduce_gradients" if started.stage == 1 else "independent_gradient_partition_epilogue"
        # Without it all gradients are reduced, zeros where there is none.
        self._compares = hasattr(started.zero, name)
        if self._compares:
            wrap(started.zero, name, self._reduce_equal)

    def _reduce_equal(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._compare(ordered=self._running.stage > 1 or self._running.zero.overlap_comm)
        return reduce(*args, **kwargs)

    def _compare(self, *, ordered: bool) -> None:
        use = self._use
        own = list(use.came) if ordered else sorted(use.used.keys() - self._apart)
        partly, orders = use.before_reduction(own, repeats=self._repeats)
        if partly:
            raise _differ(partly)
        if orders:
            rank = next(rank for rank, order in enumerate(orders) if order != orders[0])
            first, there = next(pair for pair in zip(orders[0], orders[rank], strict=True) if pair[0] != pair[1])
            raise ConfigurationError(
                f"Gradients come in different orders: where rank 0 has that of {first}, rank {rank} has that of "
                f"{there}. Stages 2 and 3, and stage 1 with overlap_comm, reduce them as they come. Run the modules in "
                "one order on every rank, or use shard_ddp."
            )

    def after_micro_batch(self) -> None:
        """ConfigurationError: with the optimizer on the host, micro-batches of a step use different parameters."""
        came = frozenset(self._use.came)
        self._first = came if self._first is None else self._first
        if self._sums_on_host and (other := self._first ^ came):
            raise ConfigurationError(
                f"Not all micro-batches of a step use {listed(sorted(other))}, but with the optimizer on the "
                "host DeepSpeed steps parameters with what the last micro-batch adds to their sums. Use "
                "shard_fsdp_offload, leave out offload_optimizer, or accumulate no gradients."
            )

    def finish(self) -> None:
        """End a step whose gradients are reduced. ConfigurationError: ranks or steps use different parameters."""
        self._first = None
        before, unused = self._unused, self._use.finish()
        if len(unused) == len(self._use.names):  # no backward pass has run: nothing is stepped
            return
        varies = self._steps > 0 and before != unused and not self._rests
        self._unused, self._steps = unused, self._steps + 1
        if varies or not self._use.partly - unused <= self._apart:
            raise _differ(self._use.partly | (before ^ unused if varies else frozenset()))
        if unused and not self._rests and not self._keeps:
            self._keep()

    def taken(self) -> Set[str]:
        """What backward passes have used since the last call, the same on all ranks, which compare it."""
        if not self._compares:
            self._compare(ordered=False)
        used = {*self._use.used, *self._apart}
        self._use.begin_step()
        return used

    def _keep(self) -> None:
        """Put the masters of what is never used back after each step, before DeepSpeed copies them."""
        started = self._running
        assert started.optimizer is not None
        if any(group.new_slot is not None for group in started.groups):
            raise ConfigurationError(
                f"No step uses {listed(sorted(self._unused))}, but with the optimizer offloaded to NVMe DeepSpeed "
                "steps them, weight decay and all. Freeze them (requires_grad_(False))."
            )
        parts = [part for member, part in layout.shards(started.groups) if member.fqn in self._unused]
        self._keeps, own = True, started.optimizer.step

        @torch.no_grad()
        def step(*args: Any, **kwargs: Any) -> Any:
            before = [part.clone() for part in parts]
            result = own(*args, **kwargs)
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
            return result

        self._closing.enter_context(running.replaced_step(started.optimizer, step))

    def with_gradients(self, shard: Shard) -> Shard:
        """``shard`` without the gradient of zeros where no rank used it."""
        return replace(shard, gradient=lambda: None if shard.fqn in self._unused else shard.gradient())


def _differ(names: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        "Ranks, or steps, use different parameters, but DeepSpeed steps them together, as flat partitions with one "
        f"count of steps. In this one not all use: {listed(sorted(names))}. Use shard_fsdp, or shard_ddp with "
        "find_unused_parameters: true."
    )


Stepping = OneOptimizer | SeveralOptimizers


def _parameter(parameter: Any, *, device: torch.device, offloaded: bool) -> Iterator[Resident]:
    if not layout.is_partitioned(parameter):
        yield Resident("parameters", memory_of(parameter, device), parameter)
        return
    in_file = parameter.ds_tensor.final_location == swapping.IN_FILES
    memory = "nvme" if in_file else "host" if offloaded else "device"
    yield Resident("parameters", memory, swapping.shard_of(parameter))
    if parameter.ds_secondary_tensor is not None:
        # hpZ's copy of the shard, over fewer ranks.
        yield Resident("parameters", memory, parameter.ds_secondary_tensor)
    # Empty while the parameter is not gathered.
    yield Resident("gathered", "device", parameter.data)


def _staging(zero: Any, parameters: Iterable[Any], *, device: torch.device) -> Iterator[Resident]:
    """Whatever else DeepSpeed's optimizer refers to: buckets, and buffers between host, device and files."""
    swappers = {id(s): s for p in parameters if (s := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        for tensor in tensors_in([swapper.buffers, swapper.partitioned_swap_buffer]):
            yield Resident("communication", "host", tensor)
    if swapping.swaps(zero):
        for tensor in tensors_in(zero.optimizer_swapper.swap_buffer_manager.all_buffers):
            yield Resident("communication", "host", tensor)
    for name, value in vars(zero).items():
        # DeepSpeed names its buffers on the host so, which on a CPU nothing else tells from the others.
        on_host = "cpu" in name or "pin_buffer" in name
        for tensor in tensors_in(value):
            yield Resident("communication", "host" if on_host else memory_of(tensor, device), tensor)
