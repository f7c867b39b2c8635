"""The values of a module's parameters, beside what DeepSpeed computes with, from a run's beginning to its end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_shard.engines.zero import layout, masters
from lightning_shard.engines.zero import running as zero
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import LiveTensor

_MASTERS = "_shard_zero_masters"
"""Where a module that stage 3 has cut keeps this rank's masters between runs."""


class Values:
    """What a checkpoint holds of a module's parameters under DeepSpeed, and where it lies on this rank.

    Of what is stepped the masters, of what DeepSpeed cast and nothing steps this rank's share as it was loaded, and
    in an evaluation without an engine the whole parameters before their cast.
    """

    def __init__(self, module: nn.Module) -> None:
        """Begin with ``module`` as it is, with the masters of an earlier run if stage 3 has cut it."""
        self._module = module
        self._kept: masters.Kept = module.__dict__.pop(_MASTERS, {})
        self._frozen: masters.Kept = {}
        self._rounded: masters.Rounded | None = None

    @property
    def kept(self) -> masters.Kept:
        """What the engine under construction would round; `share` empties it."""
        return self._kept

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """FQN to the module's parameters as DeepSpeed left them."""
        return dict(self._module.named_parameters())

    @property
    def shares(self) -> list[Tensor]:
        """This rank's shares of the loaded values that nothing steps, on the host."""
        return [values for values, _ in self._frozen.values()]

    def keep(self, compute: torch.dtype) -> None:
        """Keep what DeepSpeed's cast to ``compute`` would round, ahead of it."""
        self._kept = masters.keep(self._module, compute)

    def keep_sharded(self, kept: masters.Kept) -> None:
        """Keep what cutting the parameters set aside, unless an earlier run's masters are there."""
        self._kept = {**kept, **self._kept}

    def round(self, compute: torch.dtype) -> None:
        """Cast the parameters for an evaluation without an engine, until `leave`."""
        self._rounded = masters.Rounded(self._module, compute)

    def share(self, running: zero.Running, *, ranks: Ranks) -> None:
        """Write what was kept into the masters, and keep this rank's share of the rest."""
        masters.put(running.groups, self._kept)
        stepped = {member.fqn for group in running.groups for member in group.members if member.stepped}
        rest = {n: p for n, p in self.parameters.items() if n in self._kept and n not in stepped}
        self._frozen = masters.shares(self._kept, rest, rank=ranks.rank, size=ranks.size)
        self._kept = {}

    def tensors(self, running: zero.Running | None) -> Mapping[str, LiveTensor]:
        """FQN to the live tensor, where that is not the module's own."""
        if self._rounded is not None:
            return self._rounded.values()
        if running is None:
            return {}
        parameters = self.parameters
        cut = {n: layout.cut(p) for n, p in parameters.items() if layout.is_cut(p)}
        return {**cut, **layout.masters(running.groups), **masters.flat(self._frozen, parameters)}

    def show(self, running: zero.Running | None, *, device: torch.device) -> None:
        """Let forward see values that were changed from outside. All ranks call it."""
        if self._rounded is not None:
            self._rounded.refresh()
        if running is None or running.stage == 0:
            return
        masters.show(self._frozen, self.parameters, device=device)
        zero.refresh(running)

    def leave(self, running: zero.Running, *, device: torch.device, communicate: bool) -> None:
        """Give the module what it goes on with without its engine: whole values, or cut ones with their masters.

        Args:
            running: the engine, which is stopped afterwards.
            device: of this rank.
            communicate: whether all ranks are here; without it parameters keep the compute dtype's values.
        """
        if running.stage == 3:
            self._module.__dict__[_MASTERS] = {**self._frozen, **masters.pieces_of(running.groups)}
        elif communicate:
            zero.make_full(running, self.parameters, device=device)

    def unround(self) -> None:
        """Undo `round`."""
        if self._rounded is not None:
            self._rounded.undo()
            self._rounded = None
