"""The values of parameters beside those that DeepSpeed computes with, from a run's beginning to its end: it clones its
masters from the cast parameters, so that they begin rounded. A parameter's own memory outlives the cast here.

For stage 3 a module is sharded one submodule at a time, so that no rank ever holds the full model in any dtype.
DeepSpeed's own way is to cast a full module, or to build it under ``zero.Init`` in the compute dtype. Here each
parameter is full for a moment in the dtype that it was loaded in; the rank copies its shard of that, casts the
parameter and lets DeepSpeed shard it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.external_writes import ExternalWriteCheck, Seen
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.zero import layout, swapping
from lightning_shard.engines.zero import running as zero
from lightning_shard.engines.zero.process import group_of_hpz
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.full import gather_full
from lightning_shard.tensors.names import named_parameters, parameter_names

Loaded = dict[str, FlatSlice]  # FQN to a slice of the parameter, in the dtype that it was loaded in.

_MASTERS = "_shard_zero_masters"  # Where a module that stage 3 has sharded keeps this rank's masters between runs.


def is_kept(parameter: Tensor, values: Tensor, compute: torch.dtype) -> bool:
    """Whether the loaded ``values`` are kept beside those cast to ``compute``: rounded, or stepped by nothing."""
    rounds = torch.promote_types(values.dtype, compute) != compute
    return values.is_floating_point() and (rounds or (values.dtype != compute and not parameter.requires_grad))


class Values:
    """What a checkpoint has of parameters under DeepSpeed, on this rank: of a stepped one its master, of one that was
    cast and nothing steps its shard of loaded values, in an evaluation without an engine those before the cast.
    """

    def __init__(self, module: nn.Module) -> None:
        """Begin with ``module`` as it is, with the masters of an earlier run if stage 3 has sharded it."""
        self._module = module
        self.loaded: Loaded = module.__dict__.pop(_MASTERS, {})
        """What the engine under construction rounds; `start` empties it."""
        self.kept: Loaded = {}  # This rank's shards of the loaded values that nothing steps, on the host.
        self._rounded: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.parameters = named_parameters(module)

    def cast(self, compute: torch.dtype) -> None:
        """Cast all parameters to ``compute``, as DeepSpeed does in 16 bits alone. What they were, where it is kept,
        moves to the host: the device is to have nothing beside the cast ones and flat copies.
        """
        self.loaded = {}
        for fqn, parameter in self.parameters.items():
            if is_kept(parameter, parameter, compute):
                parameter.data = loaded = parameter.detach().cpu()
                self.loaded[fqn] = FlatSlice(loaded.flatten(), 0)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)

    @torch.no_grad()
    def start(self, running: zero.Running, *, ranks: Ranks) -> None:
        """Write the loaded values into the masters of a new engine; keep this rank's shards of the others."""
        self.parameters = named_parameters(self._module)  # A hook may name them anew before `leave`.
        for member, part in layout.shards(running.groups):
            if member.fqn in self.loaded and member.length > 0:
                loaded = self.loaded[member.fqn]
                part.copy_(loaded.data.narrow(0, member.start - loaded.start, member.length))
        stepped = {member.fqn for group in running.groups for member in group.members if member.stepped}
        for fqn, parameter in self.parameters.items():
            if fqn not in self.loaded or fqn in stepped:
                continue
            values, start = self.loaded[fqn].data, self.loaded[fqn].start
            if not layout.is_partitioned(parameter):
                size = -(-values.numel() // ranks.size)
                start = min(ranks.rank * size, values.numel())
                values = values[start : start + size]
            self.kept[fqn] = FlatSlice(values.cpu().clone(), start)
        self.loaded = {}

    def tensors(self, running: zero.Running | None) -> Mapping[str, LiveTensor]:
        """FQN to the live tensor, where that is not the module's own."""
        if running is None:
            return {fqn: data for fqn, (_, data) in self._rounded.items()}
        sharded = {n: layout.shard(p) for n, p in self.parameters.items() if layout.is_partitioned(p)}
        return {**sharded, **layout.masters(running.groups), **self._frozen_tensors()}

    def _frozen_tensors(self) -> dict[str, FlatTensor]:
        shapes = {fqn: layout.full_shape(p) for fqn, p in self.parameters.items() if fqn in self.kept}
        return {fqn: FlatTensor(shapes[fqn], part.data.dtype, [part]) for fqn, part in self.kept.items()}

    def seen(self, running: zero.Running, unit: nn.Module | None) -> Iterator[Seen]:
        """What of this module the user's writes would be lost in: under stage 3 everything, or all in ``unit``, one of
        those that it gathers for; else what is stepped, and what was cast.
        """
        leaves: Mapping[str, Tensor] = {} if running.scalars is None else running.scalars.leaves
        for fqn, leaf in leaves.items():
            parts = running.scalars.parts(fqn) if running.scalars else []
            yield Seen(fqn, leaf, leaf.detach().view(-1)[: len(parts)], parts[0] if parts else leaf.new_empty(0))
        if running.stage == 3:
            # What it rounds on its way to the ranks (qwZ, DeepSpeed's own autocast) has other values than the shards.
            rounds = running.engine.zero_quantized_weights() or running.engine.torch_autocast_enabled()
            for fqn, parameter in self.parameters.items() if unit is None else self._inside[unit]:
                if fqn in leaves:
                    continue
                if layout.is_gathered(parameter) and not rounds:
                    start, length = layout.own_range(parameter)
                    own = parameter.detach().reshape(-1)[start : start + length]
                    yield Seen(fqn, parameter, own, swapping.shard_of(parameter)[:length])
                else:
                    yield Seen(fqn, parameter, released=layout.is_released(parameter))
            return
        lasting = [(m.fqn, m.start, part) for m, part in layout.shards(running.groups) if m.stepped]
        for fqn, start, part in (*lasting, *((fqn, part.start, part.data) for fqn, part in self.kept.items())):
            if fqn in leaves:
                continue
            parameter = self.parameters[fqn]
            yield Seen(fqn, parameter, parameter.detach().reshape(-1)[start : start + part.numel()], part)

    def check_writes(self, running: zero.Running, strategy: str) -> ExternalWriteCheck:
        """The check of a fit under ``strategy`` that begins. All ranks call it."""
        gathered = layout.gathered_modules(self._module) if running.stage == 3 else []
        names = {parameter: fqn for fqn, parameter in self.parameters.items()}
        self._inside = {m: [(names[p], p) for p in layout.gathered_with(m)] for _, m in gathered}
        check = ExternalWriteCheck(strategy, partial(self.seen, running), self._inside)
        check.closing.callback(layout.watch_releases(names, check.note_release))
        check.note_versions()
        return check

    @torch.no_grad()
    def show(self, running: zero.Running | None, *, device: torch.device) -> None:
        """Let forward see values that were changed from outside. All ranks call it."""
        for parameter, data in self._rounded.values():
            parameter.data = data.to(parameter.dtype)
        if running is None:
            return
        parameters: dict[str, Any] = dict(self.parameters)
        for fqn, tensor in self._frozen_tensors().items():
            if layout.is_partitioned(parameters[fqn]):
                values = self.kept[fqn].data
                swapping.shard_of(parameters[fqn])[: values.numel()].copy_(values)
            else:
                parameters[fqn].copy_(gather_full(tensor, device=device))
        zero.refresh(running)

    @torch.no_grad()
    def leave(self, running: zero.Running, *, device: torch.device, communicate: bool) -> None:
        """Give the module full values, or shards with their masters. Without ``communicate``, where other ranks may be
        anywhere, full parameters keep the compute dtype's values.
        """
        if running.stage == 3:
            # Copies on the host, or what is mapped from files as it is: the device has the engine's still.
            in_files = {m.fqn for group in running.groups if group.new_slot is not None for m in group.members}
            masters = {
                member.fqn: FlatSlice(part if member.fqn in in_files else part.to("cpu", copy=True), member.start)
                for member, part in layout.shards(running.groups)
                if member.stepped
            }
            self._module.__dict__[_MASTERS] = {**self.kept, **masters}
        elif communicate:
            for fqn, tensor in {**layout.masters(running.groups), **self._frozen_tensors()}.items():
                self.parameters[fqn].data = gather_full(tensor, device=device).cpu()

    def round(self, compute: torch.dtype) -> None:
        """Cast the parameters but 0-d ones for an evaluation without an engine, until `unround`."""
        for fqn, parameter in self.parameters.items():
            if parameter.is_floating_point() and parameter.dtype != compute and parameter.ndim > 0:
                self._rounded[fqn] = parameter, parameter.data
                parameter.data = parameter.data.to(compute)

    def unround(self) -> None:
        while self._rounded:
            _, (parameter, data) = self._rounded.popitem()
            parameter.data = data


def partition(
    root: nn.Module, *, device: torch.device, compute: torch.dtype, seed: int, config: Mapping[str, Any]
) -> Loaded:
    """Shard every parameter under ``root`` and move its buffers. All ranks call it. What an earlier run or
    ``zero.Init`` has sharded is only cast; else values of rank 0 win, or follow from ``seed``. Returns this rank's
    shards, on the host, of what the cast to ``compute`` rounded. MaterializationError comes ahead.
    """
    import deepspeed

    materializer = Materializer(root, device=device, seed=seed)
    names = parameter_names(root)
    # DeepSpeed's default where it shards by itself; here only where the configuration asks for it.
    zero = {"memory_efficient_linear": False, **config["zero_optimization"]}
    own: Any = {"config_dict_or_path": {**config, "zero_optimization": zero}, "dtype": compute}
    own["zero_param_parallel_group"] = group_of_hpz(zero.get("zero_hpz_partition_size", 1))
    init = deepspeed.zero.Init(nn.Module(), **own)  # of no parameters: these are sharded below
    swapping.read_once(init.param_swapper)
    loaded: Loaded = {}
    for module, fqn in materializer.fqns.items():
        materializer.fill([module])
        for name, parameter in module.named_parameters(recurse=False):
            # What was on the meta device is another one now.
            known = names.setdefault(parameter, f"{fqn}.{name}".lstrip("."))
            _shard_parameter(parameter, known, device, compute, init, loaded)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
        if module not in materializer.initializers:
            broadcast_from_rank_0(module.buffers(recurse=False))
    return loaded


@torch.no_grad()
def _shard_parameter(
    parameter: Any, fqn: str, device: torch.device, compute: torch.dtype, init: Any, loaded: Loaded
) -> None:
    is_sharded = layout.is_partitioned(parameter)
    if is_sharded:
        swapping.take(parameter)
    else:
        parameter.data = parameter.data.to(device)
        broadcast_from_rank_0([parameter])
    before = (parameter.ds_tensor if is_sharded else parameter).detach()
    if before.is_floating_point():
        for tensor in (parameter, parameter.ds_tensor) if is_sharded else (parameter,):
            tensor.data = tensor.data.to(compute)
    if is_sharded:
        swapping.give(parameter, init.param_swapper)
    else:
        # Without the broadcast of `Init`, which fails for parameters without a dimension.
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
    if is_kept(parameter, before, compute):
        start, length = layout.own_range(parameter)
        own = before[:length] if is_sharded else before.reshape(-1)[start : start + length]
        loaded[fqn] = FlatSlice(own.to("cpu", copy=True), start)
