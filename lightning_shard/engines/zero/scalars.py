"""0-d parameters under ZeRO in 16 bits, which code reads in their masters' dtype on every engine."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard.engines.replicated import average_gradients
from lightning_shard.engines.zero import flat_layout
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.tensors.flat import FlatGroup, FlatTensor, LiveTensor
from lightning_shard.tensors.names import parameter_names


class ScalarLeaves:
    """Replaces 0-d parameters by leaves with their masters' values. All ranks call its methods, in one order."""

    def __init__(
        self,
        module: nn.Module,
        lasting: Mapping[str, LiveTensor],
        groups: list[FlatGroup],
        *,
        policy: PrecisionPolicy,
        device: torch.device,
    ) -> None:
        """``lasting``: FQN to a parameter's master, or its unrounded frozen value. ``groups``: the stepped masters."""
        self._device, self._groups, self._reduce_dtype = device, groups, policy.reduce
        self.leaves: dict[str, Tensor] = {}  # By FQN.
        self._sums: dict[str, Tensor] = {}  # Of this rank's gradients since the last reduction.
        self._places: list[tuple[nn.Module, str]] = []
        names = parameter_names(module)
        left_out = {m for metric in module.modules() if isinstance(metric, Metric) for m in metric.modules()}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                fqn = names[parameter]
                dtype = lasting[fqn].dtype if fqn in lasting and owner not in left_out else policy.compute
                if flat_layout.full_shape(parameter) == () and dtype != policy.compute:
                    owner.__dict__[name] = self._leaf(fqn, parameter, dtype)
                    self._places.append((owner, name))
        members = [(group, member) for group in groups for member in group.members if member.fqn in self.leaves]
        self._members = {member.fqn: (group, member) for group, member in members if member.length}
        fixed = {fqn: lasting[fqn] for fqn in self.leaves.keys() - {m.fqn for _, m in members if m.stepped}}
        self._fixed = {n: [v.view(-1) for v in t.views] for n, t in fixed.items() if isinstance(t, FlatTensor)}
        self.refresh_leaves()

    def _leaf(self, fqn: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if fqn not in self.leaves:
            leaf = torch.zeros((), dtype=dtype, device=self._device, requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(self._add, fqn, parameter))
            self.leaves[fqn] = leaf
        return self.leaves[fqn]

    def _add(self, fqn: str, parameter: Tensor, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if parameter.requires_grad and gradient is not None:  # toggle_optimizer may switch it off
            self._sums[fqn] = gradient if fqn not in self._sums else self._sums[fqn] + gradient

    def parts(self, fqn: str) -> list[Tensor]:
        """This rank's part of the unrounded value: one element, or none."""
        if fqn in self._members:
            group, member = self._members[fqn]
            return [group.flat.detach().narrow(0, member.offset, member.length)]
        return self._fixed.get(fqn, [])

    @torch.no_grad()
    def refresh_leaves(self) -> None:
        """Copy the masters' values into the leaves."""
        if not self.leaves:
            return
        # One rank has each value. fp64 holds all dtypes exactly.
        values = torch.zeros(len(self.leaves), dtype=torch.float64, device=self._device)
        for value, fqn in zip(values.split(1), self.leaves, strict=True):
            for part in self.parts(fqn):
                value.copy_(part)
        dist.all_reduce(values.view(torch.uint8), dist.ReduceOp.MAX)  # All bits of the other ranks are 0.
        for leaf, value in zip(self.leaves.values(), values, strict=True):
            leaf.data.copy_(value)

    @torch.no_grad()
    def reduce_gradients(self, zero: Any) -> None:
        """Average the gradients since the last call, and copy them into the gradients of DeepSpeed's ``zero``."""
        for fqn, leaf in self.leaves.items():
            leaf.grad = self._sums.pop(fqn, None)
        trained = {fqn: leaf for fqn, leaf in self.leaves.items() if leaf.requires_grad}
        average_gradients(trained.values(), reduce_dtype=self._reduce_dtype)
        for fqn, leaf in trained.items():
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None and (own := flat_layout.gradient_of(zero, self._groups, fqn)) is not None:
                for part in own.views:
                    part.copy_(gradient)

    def restore_parameters(self) -> None:
        """Let modules read their own parameters again."""
        for owner, name in self._places:
            owner.__dict__.pop(name, None)
        self._places.clear()
