"""What a user's own torch.utils.checkpoint runs again in backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.precision.casting import install_casts


class Net(nn.Module):
    """Recomputes two layers and what comes after each, or keeps them (None)."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sigmoid()).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        run = self.part if self.reentrant is None else partial(checkpoint, self.part, use_reentrant=self.reentrant)
        found: Tensor = run(x)
        return found


def _gradients(reentrant: bool | None, *, from_the_root: bool) -> list[Tensor]:
    torch.manual_seed(0)
    root = nn.Module()
    root.net = Net(reentrant).to(torch.bfloat16)
    install_casts(root, torch.bfloat16, output=torch.float32)
    x = torch.randn(4, 8, requires_grad=True)
    # The root's own code gets fp32 outputs, also of what is called again.
    run = root.net.part if from_the_root else root.net
    if from_the_root and reentrant is not None:
        run = partial(checkpoint, run, use_reentrant=reentrant)
    output: Tensor = run(x)
    output.square().sum().backward()
    return [p.grad for p in root.parameters() if p.grad is not None]


@pytest.mark.parametrize("from_the_root", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_it_computes_as_in_forward(reentrant: bool, from_the_root: bool) -> None:
    kept = _gradients(None, from_the_root=from_the_root)
    again = _gradients(reentrant, from_the_root=from_the_root)
    assert len(kept) == 4
    assert all(map(torch.equal, kept, again))
