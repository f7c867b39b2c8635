"""A small module stepped in each form that engines give its parameters, and flat ones cut as ZeRO cuts them.

Gradients are made up, the same for every form and number of ranks, so that all forms hold equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.tensors.flat import (
    AnyOptimizer,
    FlatGroup,
    FlatMember,
    FlatOptimizer,
    FlatTensor,
    torch_optimizer,
)
from tests.checkpoint.calls import live

FORMS = ("whole", "dtensor", "stage 1", "stage 3")


class Net(nn.Module):
    """Odd sizes, fewer rows than ranks, a scalar, no elements at all, a tie, a frozen parameter and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 3)
        self.kernel = nn.Parameter(torch.randn(2, 3, 1, 3))
        self.row = nn.Parameter(torch.randn(1, 4))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.register_buffer("count", torch.tensor(seed))


GROUPS: list[dict[str, Any]] = [
    # The frozen one is in the middle of its group, as it is for who gives an optimizer all parameters.
    {"names": ["embed.weight", "body.weight", "frozen", "kernel", "row"], "lr": 0.01, "weight_decay": 0.1},
    {"names": ["body.bias", "head.bias", "scale", "nothing"], "lr": 0.02, "weight_decay": 0.0, "amsgrad": True},
]


@dataclass
class Run:
    """A module in one form, its optimizer, and the masters beside the module."""

    net: nn.Module
    optimizer: AnyOptimizer
    masters: dict[str, Tensor | FlatTensor] = field(default_factory=dict)
    steps: int = 0

    def step(self, count: int, skip: tuple[str, ...] = ()) -> Run:
        """Steps with made-up gradients; parameters in ``skip`` have none."""
        for _ in range(count):
            gradients = made_up_gradients(self.steps)
            for name in skip:
                del gradients[name]
            if isinstance(self.optimizer, FlatOptimizer):
                _step_flat(self.optimizer, gradients)
            else:
                _step_whole(self.net, self.optimizer, gradients)
            self.steps += 1
        return self

    def values(self) -> dict[str, Tensor]:
        """Key to a copy of the whole tensor, of all that a checkpoint is to have. All ranks call it."""
        return {key: whole(tensor) for key, tensor in live(self.net, [self.optimizer], self.masters).items()}

    def flats(self) -> list[FlatGroup]:
        assert isinstance(self.optimizer, FlatOptimizer)
        return list(self.optimizer.groups)


def build(form: str, seed: int, *, dtype: torch.dtype = torch.float32, lr: float | None = None) -> Run:
    """``form``: one of `FORMS`; ``dtype``: of what the optimizer steps; ``lr``: of all groups."""
    net = Net(seed).to(dtype)
    if form == "dtensor":
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={net.scale})
    parameters = dict(net.named_parameters())
    settings = [{k: v for k, v in group.items() if k != "names"} for group in GROUPS]
    if lr is not None:
        settings = [{**group, "lr": lr} for group in settings]
    if form in ("whole", "dtensor"):
        groups = [
            {**group, "params": [parameters[name] for name in names]}
            for group, names in zip(settings, (group["names"] for group in GROUPS), strict=True)
        ]
        return Run(net, torch.optim.AdamW(groups))
    cut = stage_1 if form == "stage 1" else stage_3
    flats = [cut({name: parameters[name] for name in group["names"]}) for group in GROUPS]
    optimizer = torch.optim.AdamW(
        [{**group, "params": [flat for flat, _ in parts]} for group, parts in zip(settings, flats, strict=True)]
    )
    flat_groups = [
        FlatGroup(flat=flat, members=members, group=group)
        for group, parts in zip(optimizer.param_groups, flats, strict=True)
        for flat, members in parts
    ]
    if form == "stage 3":
        for group in optimizer.param_groups:
            group["params"] = []  # as ZeRO-3 leaves them between two steps
    for parameter in parameters.values():
        # The engine's own copies are no masters: rounded ones, or none.
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16) if form == "stage 1" else torch.empty(0)
    return Run(net, FlatOptimizer(optimizer=optimizer, groups=flat_groups), masters_of(flat_groups))


def masters_of(groups: list[FlatGroup]) -> dict[str, Tensor | FlatTensor]:
    return {member.fqn: member.view(group.flat) for group in groups for member in group.members if member.stepped}


Flats = list[tuple[nn.Parameter, tuple[FlatMember, ...]]]


def stage_1(parameters: Mapping[str, Tensor]) -> Flats:
    """All parameters of a group concatenated, padded to twice the ranks, in equal contiguous parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stepped = {name: p for name, p in parameters.items() if p.requires_grad}
    flat = torch.cat([p.detach().flatten() for p in stepped.values()])
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % (2 * size))])
    part = len(flat) // size
    return [flat_with(flat[rank * part : (rank + 1) * part], rank * part, parameters)]


def flat_with(
    flat: Tensor, first: int, parameters: Mapping[str, Tensor]
) -> tuple[nn.Parameter, tuple[FlatMember, ...]]:
    """A rank's part, from element ``first`` on, of the concatenated parameters, and what of them is in it."""
    members, place = [], 0
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            members.append(FlatMember(fqn=name, shape=parameter.shape, stepped=False))
            continue
        begin = max(place, first)
        length = max(0, min(place + parameter.numel(), first + len(flat)) - begin)
        offset, start = (begin - first, begin - place) if length else (0, 0)
        members.append(FlatMember(fqn=name, shape=parameter.shape, offset=offset, start=start, length=length))
        place += parameter.numel()
    return nn.Parameter(flat.clone()), tuple(members)


def stage_3(parameters: Mapping[str, Tensor], at_a_time: int = 2) -> Flats:
    """Each parameter padded and cut over the ranks; this rank's parts concatenated, a few parameters at a time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flats: Flats = []
    for first in range(0, len(parameters), at_a_time):
        parts, members, place = [], [], 0
        for name in list(parameters)[first : first + at_a_time]:
            parameter = parameters[name].detach().flatten()
            if not parameters[name].requires_grad:
                members.append(FlatMember(fqn=name, shape=parameters[name].shape, stepped=False))
                continue
            part = -(-len(parameter) // size)
            start = min(rank * part, len(parameter))
            mine = parameter[start : start + part]
            parts.append(torch.cat([mine, mine.new_zeros(part - len(mine))]))
            members.append(
                FlatMember(fqn=name, shape=parameters[name].shape, offset=place, start=start, length=len(mine))
            )
            place += part
        flats.append((nn.Parameter(torch.cat(parts)), tuple(members)))
    return flats


def made_up_gradients(step: int) -> dict[str, Tensor]:
    """FQN to gradient, of every trainable parameter."""
    gradients = {}
    for place, (name, parameter) in enumerate(Net(0).named_parameters()):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + place)
            gradients[name] = torch.randn(parameter.shape, generator=generator)
    return gradients


def _step_whole(net: nn.Module, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in net.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None and isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    optimizer.step()


def _step_flat(optimizer: FlatOptimizer, gradients: Mapping[str, Tensor]) -> None:
    listed = [group["params"] for group in optimizer.optimizer.param_groups]
    for flat_group in optimizer.groups:
        flat = flat_group.flat
        flat.grad = torch.zeros_like(flat)
        for member in flat_group.members:
            if member.fqn in gradients:
                part = gradients[member.fqn].flatten()[member.start : member.start + member.length]
                flat.grad[member.offset : member.offset + member.length] = part
    for group in optimizer.optimizer.param_groups:
        group["params"] = [each.flat for each in optimizer.groups if each.group is group]
    optimizer.optimizer.step()
    for group, params in zip(optimizer.optimizer.param_groups, listed, strict=True):
        group["params"] = params


def whole(tensor: Tensor | FlatTensor) -> Tensor:
    """A copy of the whole tensor. All ranks call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if isinstance(tensor, Tensor):
        return tensor.detach().clone()
    full = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.__create_chunk_list__():
        slices = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        full[slices] = tensor.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
    dist.all_reduce(full)  # the other ranks' parts are zero here
    return full


def padding(run: Run) -> Tensor:
    """What of all flat slots belongs to no parameter."""
    left = []
    for group in run.flats():
        free = torch.ones(len(group.flat), dtype=torch.bool)
        for member in group.members:
            free[member.offset : member.offset + member.length] = False
        for slot in torch_optimizer(run.optimizer).state[group.flat].values():
            if isinstance(slot, Tensor) and slot.shape == group.flat.shape:
                left.append(slot[free])
    return torch.cat(left)
