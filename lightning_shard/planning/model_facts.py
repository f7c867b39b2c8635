"""Describe a model and an optimizer before a run, in plain data from which memory and traffic are computed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.checkpoint.optimizer_state import state_of_small
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.units import Unit, ignored_parameters
from lightning_shard.planning.memory_trace import LiveBytes, TraceError, explain_failure, unit_names
from lightning_shard.planning.operators import Device, OperatorTimes
from lightning_shard.precision.policy import DTYPES, PrecisionPolicy
from lightning_shard.tensors.tracing import tree_leaves


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter of a model. A tied one counts once."""

    fqn: str  # Its first name in the LightningModule.
    shape: tuple[int, ...]  # The full parameter's.
    dtype: torch.dtype  # As loaded.
    trainable: bool = True  # Whether it has a gradient.
    unit: str = ""  # Name of the shard unit that gathers it. "": the root.
    unsharded: bool = False  # Whether FSDP leaves it full: it is 0-d, in a metric, or in one of ``ignored_modules``.
    group: int | None = 0  # Index of its parameter group in the optimizer. None: it is in no optimizer.
    reshard: bool | int | None = None  # Its unit's own ``reshard_after_forward``.
    compute: torch.dtype | None = None  # Its unit's own compute dtype.

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def seen_in(self, compute: torch.dtype) -> torch.dtype:
        """Its dtype in forward."""
        return (self.compute or compute) if self.dtype.is_floating_point else self.dtype

    def stepped_in(self, master: torch.dtype) -> torch.dtype:
        """Its dtype on an engine that steps the parameters themselves. Frozen ones keep their own."""
        return master if self.trainable and self.dtype.is_floating_point else self.dtype


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    parameters: tuple[ParameterFacts, ...]  # In registration order.
    buffer_bytes: int = 0  # Of buffers and metrics' states, which every engine replicates.

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        return tuple(p for p in self.parameters if p.trainable and p.dtype.is_floating_point)

    @cached_property
    def stepped_parameters(self) -> tuple[ParameterFacts, ...]:
        return tuple(p for p in self.trainable if p.group is not None)

    @cached_property
    def outside(self) -> tuple[ParameterFacts, ...]:
        """Trainable parameters in no optimizer. torch's engines keep their gradients: no ``zero_grad`` drops them."""
        return tuple(p for p in self.trainable if p.group is None)

    @cached_property
    def units(self) -> Mapping[str, tuple[ParameterFacts, ...]]:
        """The parameters of each shard unit in registration order, the root's under ""."""
        found: dict[str, list[ParameterFacts]] = {"": []}
        for parameter in self.parameters:
            found.setdefault(parameter.unit, []).append(parameter)
        return {name: tuple(members) for name, members in found.items()}

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


Groups = Sequence[Mapping[str, Any]]  # An optimizer's parameter groups.


def model_facts(
    root: nn.Module, *, units: Sequence[Unit] = (), unsharded: Iterable[Tensor] = (), groups: Groups = ()
) -> ModelFacts:
    """Describe a full module. ``unsharded``: parameters that FSDP leaves full besides 0-d ones and metrics'."""
    unit_of, rules = unit_names(units), {unit.name: unit.rule for unit in units}
    metrics = [module for module in root.modules() if isinstance(module, Metric)]
    ignored = {id(p) for p in unsharded} | {id(p) for metric in metrics for p in metric.parameters()}
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    parameters = tuple(
        ParameterFacts(
            fqn=fqn,
            shape=tuple(p.shape),
            dtype=p.dtype,
            trainable=p.requires_grad,
            unit=unit_of.get(id(p), ""),
            unsharded=id(p) in ignored or not p.ndim,
            group=group_of.get(id(p)) if groups else 0,
            reshard=rule.reshard_after_forward if (rule := rules.get(unit_of.get(id(p), ""))) else None,
            compute=DTYPES.get(rule.compute or "") if rule else None,
        )
        for fqn, p in root.named_parameters()
    )
    states = tree_leaves([metric.metric_state for metric in metrics])
    tensors: dict[int, Tensor] = {id(t): t for t in (*root.buffers(), *states)}  # Each tensor once.
    return ModelFacts(parameters=parameters, buffer_bytes=sum(t.nbytes for t in tensors.values()))


def facts_of(module: nn.Module, engine: Engine, groups: Groups = ()) -> ModelFacts:
    """Describe a LightningModule under an engine. Its parameters are full, with or without data."""
    _, ignored = ignored_parameters(module, engine.ignored_modules())
    return model_facts(module, units=engine.units(module), unsharded=ignored(), groups=groups)


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """An optimizer's state and the cost of its step."""

    # Dtypes of the slots with their parameter's shape. None: the parameter's dtype. Default: Adam's two moments.
    slots: tuple[torch.dtype | None, ...] = (None, None)
    fixed_bytes: int = 4  # Bytes of 0-d slots for each stepped tensor, such as Adam's step count.
    unsharded_bytes: int = 0  # Bytes of all other slots, such as Adafactor's rows and columns. No engine shards them.
    temporary: float = 0.0  # Temporary bytes of a step for each byte of the stepped tensors.
    whole: bool = False  # Whether it steps full parameters. On an engine that shards, owner ranks step them.
    share: float = 1.0  # Share of the stepped elements in the largest of several optimizers.
    moved: float = 22.0  # Bytes read and written for each byte of the stepped tensors. Default: torch's foreach AdamW.

    def state_bytes(self, elements: Iterable[int], dtype: torch.dtype) -> int:
        """Bytes of state for stepped tensors of ``dtype`` with these numbers of elements."""
        slots = sum((slot or dtype).itemsize for slot in self.slots)
        return self.unsharded_bytes + sum(count * slots + self.fixed_bytes for count in elements)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, apart from its engine: together they determine a rank's memory and traffic."""

    model: ModelFacts
    policy: PrecisionPolicy
    optimizer: OptimizerFacts = OptimizerFacts()
    micro_batches: int = 1  # Micro-batches per optimizer step.
    manual: bool = False  # Whether training_step runs backward itself.

    @property
    def stepped_share(self) -> float:
        """Share of the parameters' bytes that the optimizer steps, on engines without separate masters."""
        every = sum(p.numel * p.stepped_in(self.policy.master).itemsize for p in self.model.parameters)
        return sum(p.numel for p in self.model.stepped_parameters) * self.policy.master.itemsize / max(1, every)

    @property
    def saved(self) -> int:
        """Bytes of a checkpoint's tensors without averages, equal on every engine."""
        master, stepped = self.policy.master, [p.numel for p in self.model.stepped_parameters]
        own = sum(p.numel * p.stepped_in(master).itemsize for p in self.model.parameters)
        return own + self.optimizer.state_bytes(stepped, master)


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts | None:
    """Find the state of ``optimizer`` by a step of a small one of its class and settings. None: that can't be built."""
    parameter = torch.zeros(3, 5)
    if (found := state_of_small(optimizer, parameter)) is None:
        return None
    tensors = [value for value in found[0].values() if isinstance(value, Tensor)]
    return OptimizerFacts(
        slots=tuple(_slot_dtype(tensor, parameter) for tensor in tensors if tensor.shape == parameter.shape),
        fixed_bytes=sum(tensor.nbytes for tensor in tensors if tensor.shape != parameter.shape),
    )


def trace_optimizer(root: nn.Module, optimizer: Optimizer, mode: Any) -> OptimizerFacts:
    """Find the state and the temporary bytes of ``optimizer`` by a step on fake parameters of ``root``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    with mode:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    live = LiveBytes([*root.parameters(), *root.buffers(), *gradients])
    live.begin_segment("backward", "")
    # A device on which one byte takes one second.
    counted = OperatorTimes(Device(products=inf, single=inf, memory=1.0, kernel=0.0), lambda: 0)
    try:
        with mode, live, counted:
            optimizer.step()
        live.end_segment()
    except Exception as error:
        raise TraceError(explain_failure(error, live.last_operation)) from error
    finally:
        optimizer.zero_grad(set_to_none=True)
    slots: dict[str, torch.dtype | None] = {}
    fixed = unsharded = total = 0
    for parameter in parameters:
        tensors = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor)}
        same = {k: v for k, v in tensors.items() if v.shape == parameter.shape and parameter.ndim}
        slots |= {name: _slot_dtype(slot, parameter) for name, slot in same.items()}
        others = [slot for name, slot in tensors.items() if name not in same]
        fixed = max(fixed, sum(slot.nbytes for slot in others if not slot.ndim))
        unsharded += sum(slot.nbytes for slot in others if slot.ndim)
        total += sum(slot.nbytes for slot in tensors.values())
    stepped = max(1, sum(p.nbytes for p in parameters))
    return OptimizerFacts(
        slots=tuple(slots.values()),
        fixed_bytes=fixed,
        unsharded_bytes=unsharded,
        temporary=max(0.0, (live.segments[0].activations - total) / stepped),
        moved=(counted.parts[0].products + counted.parts[0].memory) / stepped,
    )


def _slot_dtype(slot: Tensor, parameter: Tensor) -> torch.dtype | None:
    return None if slot.dtype == parameter.dtype else slot.dtype
