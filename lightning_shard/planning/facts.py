"""What is known of a model and an optimizer: plain data that the arithmetic of `states` starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard.engines.units import Unit


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter of a model; a tied one counts once."""

    fqn: str
    """Its first name in the LightningModule."""

    shape: tuple[int, ...]
    """Of the whole."""

    dtype: torch.dtype
    """In which the model was loaded."""

    trainable: bool = True
    """Whether the optimizer steps it."""

    unit: str = ""
    """Name of the shard unit that gathers it; "": the root's."""

    whole: bool = False
    """Whether FSDP leaves it alone: 0-d, in a metric, or in one of ``ignored_modules``."""

    group: int = 0
    """Place of its parameter group in the optimizer."""

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    def seen_in(self, compute: torch.dtype) -> torch.dtype:
        """Dtype in which forward sees it."""
        return compute if self.dtype.is_floating_point else self.dtype

    def stepped_in(self, master: torch.dtype) -> torch.dtype:
        """Dtype in which an engine without a second copy keeps it: a frozen one keeps its own."""
        return master if self.trainable and self.dtype.is_floating_point else self.dtype


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model's tensors."""

    parameters: tuple[ParameterFacts, ...]
    """In registration order."""

    buffer_bytes: int = 0
    """Of buffers and of metrics' states; every engine keeps them whole on every rank."""

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """What the optimizer steps."""
        return tuple(p for p in self.parameters if p.trainable and p.dtype.is_floating_point)

    @cached_property
    def units(self) -> Mapping[str, tuple[ParameterFacts, ...]]:
        """The parameters of each shard unit, in registration order; the root's under ""."""
        found: dict[str, list[ParameterFacts]] = {"": []}
        for parameter in self.parameters:
            found.setdefault(parameter.unit, []).append(parameter)
        return {name: tuple(members) for name, members in found.items()}

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.parameters)


def model_facts(
    root: nn.Module,
    *,
    units: Sequence[Unit] = (),
    whole: Iterable[Tensor] = (),
    groups: Sequence[Mapping[str, Any]] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelFacts:
    """The facts of a module whose parameters are whole: real, on the meta device, or fake.

    Args:
        root: the LightningModule.
        units: its shard units, from `lightning_shard.engines.units.find_units`.
        whole: parameters that FSDP leaves alone besides 0-d ones.
        groups: the optimizer's parameter groups, for engines that cut group by group.
        shapes: FQN to the whole shape, where an engine has cut the parameters already.
    """
    unit_of: dict[int, str] = {}
    for unit in units:
        for module in unit.modules:
            for parameter in module.parameters():
                unit_of.setdefault(id(parameter), unit.names[0])
    alone = {id(p) for p in whole} | {id(p) for m in root.modules() if isinstance(m, Metric) for p in m.parameters()}
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    parameters = []
    for fqn, parameter in root.named_parameters():
        shape = tuple((shapes or {}).get(fqn, parameter.shape))
        parameters.append(
            ParameterFacts(
                fqn=fqn,
                shape=shape,
                dtype=parameter.dtype,
                trainable=parameter.requires_grad,
                unit=unit_of.get(id(parameter), ""),
                whole=id(parameter) in alone or not shape,
                group=group_of.get(id(parameter), 0),
            )
        )
    return ModelFacts(parameters=tuple(parameters), buffer_bytes=buffer_bytes(root))


def buffer_bytes(root: nn.Module) -> int:
    """Bytes of the buffers, each once, and of the metrics' states."""
    tensors: dict[int, Tensor] = {id(b): b for b in root.buffers()}
    for module in root.modules():
        if isinstance(module, Metric):
            for name in module._defaults:
                state = getattr(module, name)
                tensors.update({id(t): t for t in (state if isinstance(state, list) else [state])})
    return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """An optimizer's state: slots with an element for each of a parameter's, and small ones."""

    slots: tuple[torch.dtype | None, ...] = (None, None)
    """Dtypes of the elementwise slots; None: the stepped parameter's. The default is Adam's two moments."""

    fixed_bytes: int = 4
    """Bytes per stepped tensor of slots that are no larger however large it is, such as Adam's step count."""

    uncut: Mapping[str, int] = field(default_factory=dict)
    """FQN to bytes of slots of other shapes, such as Adafactor's rows and columns; these no engine cuts."""

    on_the_way: float = 0.0
    """Bytes that a step needs for its duration, as a part of those of the tensors that it steps."""
