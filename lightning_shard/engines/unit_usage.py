"""Which parameters a step uses under FSDP2, which reduces those of a unit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.engines._fsdp2 import gathered_parameters
from lightning_shard.engines.usage import Usage
from lightning_shard.errors import WrappingError


class UnitUsage:
    """`Usage` of a module whose units reduce zeros for unused parameters as long as ranks may differ in them."""

    def __init__(self, root: nn.Module, *, always: bool, compiled: bool) -> None:
        """Begin to look at the steps of ``root``, which is sharded; its trainable parameters count.

        ``always``: ranks tell each other what they use in every step. ``compiled``: units are compiled, so that nothing
        is hooked to their parameters; those with a gradient are used.
        """
        self._names = {p: fqn for fqn, p in root.named_parameters() if p.requires_grad}
        self._usage = Usage(self._names.values(), always=always)
        self._units: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
        self._undo: list[Callable[[], None]] = []
        self._watched: set[str] = set()
        self._reduces_zeros = False
        if compiled and not always:
            return
        # Full parameters are there once a unit has run; before FSDP's own hooks, which free them.
        for unit in self._units:
            hook = unit.register_forward_hook(self.watch, prepend=True)
            self._undo.append(hook.remove)
        for parameter, fqn in self._names.items():
            if not isinstance(parameter, DTensor):
                self._watched.add(fqn)
                self._undo.append(self._usage.watch(fqn, parameter))
        self._reduce_zeros(True)

    def _reduce_zeros(self, enabled: bool) -> None:
        for unit in self._units:
            # New in torch 2.13.
            if (switch := getattr(unit, "set_reduce_scatter_unused_params", None)) is not None:
                switch(enabled, recurse=False)
                self._reduces_zeros = enabled

    def watch(self, unit: Any, *arguments: Any) -> None:
        """Look at the parameters of ``unit``, which is gathered; the root's step ends without a hook."""
        for shard, full, _ in gathered_parameters(unit) if self._undo else ():
            fqn = self._names.get(shard)
            if fqn is not None and full.requires_grad and fqn not in self._watched:
                self._watched.add(fqn)
                self._undo.append(self._usage.watch(fqn, full))

    def finish(self) -> None:
        """End a step whose gradients are reduced: those of parameters that no rank used are None. All ranks call it.

        WrappingError: ranks use different parameters, and torch can't reduce them.
        """
        # Units that run by another method than forward are not seen.
        others = [n for p, n in self._names.items() if n not in self._watched and p.grad is not None]
        unused = self._usage.finish(others)
        if self._usage.differs and not self._reduces_zeros:
            raise WrappingError(
                "Ranks use different parameters in a step, which needs torch 2.13 or newer and no compile here; this "
                f"is torch {torch.__version__}. Use shard_ddp with find_unused_parameters: true."
            )
        for parameter, fqn in self._names.items():
            if fqn in unused:
                parameter.grad = None
        if self._usage.settled:
            self.close()

    def close(self) -> None:
        """Take off what looks at the steps."""
        while self._undo:
            self._undo.pop()()
        self._watched.clear()
        if self._reduces_zeros:
            self._reduce_zeros(False)
