"""Values that DeepSpeed would round: kept while its engine is built, and put where its optimizer steps them.

DeepSpeed casts every parameter to the compute dtype, then clones its masters from what is left, so that they begin
rounded. A parameter's own memory outlives the cast here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.zero import layout, swapping
from lightning_shard.tensors.flat import FlatGroup, FlatSlice, FlatTensor
from lightning_shard.tensors.full import gather_full

Kept = dict[str, tuple[Tensor, int]]
"""FQN to a 1-D part of the parameter and where it starts in its row-major order."""


def keep(module: nn.Module, compute: torch.dtype) -> Kept:
    """The floating parameters of ``module`` that casting to ``compute`` would round, in the memory that they have."""
    return {
        fqn: (parameter.detach().flatten(), 0)
        for fqn, parameter in module.named_parameters()
        if is_rounded(parameter, compute)
    }


def is_rounded(parameter: Tensor, compute: torch.dtype) -> bool:
    """Whether casting ``parameter`` to ``compute`` may change values."""
    return parameter.is_floating_point() and torch.promote_types(parameter.dtype, compute) != compute


class Rounded:
    """Casts the parameters of a module for evaluation, and puts them back."""

    def __init__(self, module: nn.Module, compute: torch.dtype) -> None:
        """Cast what is floating to ``compute``."""
        self._compute = compute
        self._parameters = [(fqn, p, p.data) for fqn, p in module.named_parameters() if p.is_floating_point()]
        self.refresh()

    def values(self) -> dict[str, Tensor]:
        """FQN to the values before the cast, live."""
        return {fqn: data for fqn, _, data in self._parameters}

    def refresh(self) -> None:
        """Cast again, after the values were changed."""
        for _, parameter, data in self._parameters:
            parameter.data = data.to(self._compute)

    def undo(self) -> None:
        """Give the parameters their values back."""
        for _, parameter, data in self._parameters:
            parameter.data = data


@torch.no_grad()
def put(groups: Sequence[FlatGroup], kept: Kept) -> None:
    """Write the kept values into the masters, where this rank has them."""
    for member, part in layout.pieces(groups):
        if member.fqn in kept and member.length > 0:
            values, start = kept[member.fqn]
            part.copy_(values.narrow(0, member.start - start, member.length))


def pieces_of(groups: Sequence[FlatGroup]) -> Kept:
    """The masters that this rank has, to go on with in a later run: copies, or mapped from files as they are."""
    in_files = {member.fqn for group in groups if group.new_slot is not None for member in group.members}
    return {
        member.fqn: (part if member.fqn in in_files else part.clone(), member.start)
        for member, part in layout.pieces(groups)
        if member.stepped
    }


def shares(kept: Kept, parameters: Mapping[str, nn.Parameter], *, rank: int, size: int) -> Kept:
    """This rank's share of the kept values of ``parameters``, on the host: of a cut parameter, the piece it has."""
    found: Kept = {}
    for fqn, parameter in parameters.items():
        values, start = kept[fqn]
        if not layout.is_cut(parameter):
            share = -(-values.numel() // size)
            start = min(rank * share, values.numel())
            values = values[start : start + share]
        found[fqn] = values.cpu().clone(), start
    return found


def flat(kept: Kept, parameters: Mapping[str, nn.Parameter]) -> dict[str, FlatTensor]:
    """The shares as parts of their parameters, in place."""
    return {
        fqn: FlatTensor(layout.true_shape(parameters[fqn]), values.dtype, [FlatSlice(values, start)])
        for fqn, (values, start) in kept.items()
    }


@torch.no_grad()
def show(kept: Kept, parameters: Mapping[str, nn.Parameter], *, device: torch.device) -> None:
    """Let forward see the shares. All ranks call it."""
    whole = flat(kept, parameters)
    for fqn, (values, _) in kept.items():
        parameter: Any = parameters[fqn]
        if layout.is_cut(parameter):
            swapping.piece(parameter)[: values.numel()].copy_(values)
        else:
            parameter.copy_(gather_full(whole[fqn], device=device))
