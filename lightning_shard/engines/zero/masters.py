"""Values that DeepSpeed would round: kept while its engine is built, and put where its optimizer steps them.

DeepSpeed casts every parameter to the compute dtype, then clones its masters from what is left, so that they begin
rounded. A parameter's own memory outlives the cast here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_shard.checkpoint.flat_shard import FlatPiece, FlatTensor
from lightning_shard.checkpoint.stepped import FlatGroup
from lightning_shard.engines.zero import layout

Kept = dict[str, tuple[Tensor, int]]
"""FQN to a 1-D part of the parameter and where it starts in its row-major order."""


def keep(module: nn.Module, compute: torch.dtype) -> Kept:
    """The floating parameters of ``module`` that casting to ``compute`` would round, in the memory that they have."""
    return {
        fqn: (parameter.detach().flatten(), 0)
        for fqn, parameter in module.named_parameters()
        if parameter.is_floating_point() and torch.promote_types(parameter.dtype, compute) != compute
    }


@torch.no_grad()
def put(groups: Sequence[FlatGroup], kept: Kept) -> None:
    """Write the kept values into the masters, where this rank has them."""
    for member, part in layout.pieces(groups):
        if member.fqn in kept:
            values, start = kept[member.fqn]
            part.copy_(values.narrow(0, member.start - start, member.length))


def frozen(kept: Kept, shapes: Mapping[str, Sequence[int]], *, rank: int, size: int) -> dict[str, FlatTensor]:
    """This rank's share of each kept parameter in ``shapes``, on the host, in its own dtype."""
    shares = {}
    for fqn, shape in shapes.items():
        values, start = kept[fqn]
        if start == 0 and values.numel() == torch.Size(shape).numel():
            share = -(-values.numel() // size)
            start = min(rank * share, values.numel())
            values = values[start : start + share]
        shares[fqn] = FlatTensor(shape, values.dtype, [FlatPiece(data=values.cpu().clone(), start=start)])
    return shares
