"""Unrounded values of parameters under DeepSpeed, from the start of a run to its end, and sharding for stage 3.

DeepSpeed clones its masters from the cast parameters, so that they begin rounded. Here the loaded values outlive the
cast, and are written into the masters. For stage 3 one parameter at a time is full, in its loaded dtype. The rank
copies its shard, casts the parameter and lets DeepSpeed shard it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.engines.external_writes import ExternalWriteCheck, SeenParameter
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.zero import flat_layout, swapping
from lightning_shard.engines.zero.connection import existing_hpz_group
from lightning_shard.engines.zero.running_engine import RunningEngine
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.flat import FlatSlice, FlatTensor, LiveTensor
from lightning_shard.tensors.full import gather_full
from lightning_shard.tensors.names import named_parameters, parameter_names

LoadedSlices = dict[str, FlatSlice]  # FQN to a slice of the parameter, in its loaded dtype.
_MASTERS = "_shard_zero_masters"  # Attribute of a module sharded by stage 3: this rank's masters between runs.


def is_kept(parameter: Tensor, values: Tensor, compute: torch.dtype) -> bool:
    """Whether to keep loaded ``values`` after the cast to ``compute``: it rounds them, or no optimizer steps them."""
    rounds = torch.promote_types(values.dtype, compute) != compute
    return values.is_floating_point() and (rounds or (values.dtype != compute and not parameter.requires_grad))


class ParameterValues:
    """This rank's values of parameters for checkpoints: the master of a stepped parameter, a shard of the loaded values
    of a frozen one that was cast, and in an evaluation without an engine the values before the cast.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take ``module``, and the masters of an earlier run if stage 3 has sharded it."""
        self._module = module
        self.loaded: LoadedSlices = module.__dict__.pop(_MASTERS, {})
        """The values that the engine's start rounds, until `write_masters`."""
        self.kept: LoadedSlices = {}  # This rank's shards of loaded values of frozen parameters, on the host.
        self._rounded: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.parameters = named_parameters(module)

    def cast_parameters(self, compute: torch.dtype) -> None:
        """Cast all parameters to ``compute``, as DeepSpeed does in 16 bits alone. Values to keep move to the host."""
        self.loaded = {}
        for fqn, parameter in self.parameters.items():
            if is_kept(parameter, parameter, compute):
                parameter.data = loaded = parameter.detach().cpu()
                self.loaded[fqn] = FlatSlice(loaded.flatten(), 0)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)

    @torch.no_grad()
    def write_masters(self, running: RunningEngine, *, ranks: Ranks) -> None:
        """Write the loaded values into the masters of a new engine, and keep this rank's shards of the others."""
        self.parameters = named_parameters(self._module)  # A hook may rename them before `give_back`.
        for member, part in flat_layout.master_slices(running.groups):
            if member.fqn in self.loaded and member.length > 0:
                loaded = self.loaded[member.fqn]
                part.copy_(loaded.data.narrow(0, member.start - loaded.start, member.length))
        stepped = {member.fqn for group in running.groups for member in group.members if member.stepped}
        for fqn, parameter in self.parameters.items():
            if fqn not in self.loaded or fqn in stepped:
                continue
            values, start = self.loaded[fqn].data, self.loaded[fqn].start
            if not flat_layout.is_partitioned(parameter):
                size = -(-values.numel() // ranks.size)
                start = min(ranks.rank * size, values.numel())
                values = values[start : start + size]
            self.kept[fqn] = FlatSlice(values.cpu().clone(), start)
        self.loaded = {}

    def live_tensors(self, running: RunningEngine | None) -> Mapping[str, LiveTensor]:
        """FQN to the live tensor, unless that is the module's own."""
        if running is None:
            return {fqn: data for fqn, (_, data) in self._rounded.items()}
        sharded = {fqn: p for fqn, p in self.parameters.items() if flat_layout.is_partitioned(p)}
        shards = {fqn: flat_layout.parameter_shard(p) for fqn, p in sharded.items()}
        return {**shards, **flat_layout.master_tensors(running.groups), **self._frozen_tensors()}

    def _frozen_tensors(self) -> dict[str, FlatTensor]:
        shapes = {fqn: flat_layout.full_shape(p) for fqn, p in self.parameters.items() if fqn in self.kept}
        return {fqn: FlatTensor(shapes[fqn], part.data.dtype, [part]) for fqn, part in self.kept.items()}

    def copies_in_module(self, running: RunningEngine, unit: nn.Module | None) -> Iterator[SeenParameter]:
        """The tensors in which a user's writes would be lost. ``unit``: only the tensors of a shard unit of stage 3."""
        leaves: Mapping[str, Tensor] = running.scalars.leaves if running.scalars else {}
        for fqn, leaf in leaves.items():
            parts = running.scalars.parts(fqn) if running.scalars else []
            kept = parts[0] if parts else leaf.new_empty(0)
            yield SeenParameter(fqn, leaf, leaf.detach().view(-1)[: len(parts)], kept)
        if running.stage == 3:
            # qwZ and DeepSpeed's own autocast round on the way to the ranks, to other values than the shards.
            rounds = running.engine.zero_quantized_weights() or running.engine.torch_autocast_enabled()
            for fqn, parameter in self.parameters.items() if unit is None else self._inside[unit]:
                if fqn in leaves:
                    continue
                if flat_layout.is_gathered(parameter) and not rounds:
                    start, length = flat_layout.own_range(parameter)
                    own = parameter.detach().reshape(-1)[start : start + length]
                    yield SeenParameter(fqn, parameter, own, swapping.live_shard(parameter)[:length])
                else:
                    state: Any = parameter  # With DeepSpeed's attributes.
                    is_released = flat_layout.is_partitioned(state) and state.ds_status.name == "NOT_AVAILABLE"
                    yield SeenParameter(fqn, parameter, released=is_released)
            return
        lasting = [(m.fqn, m.start, part) for m, part in flat_layout.master_slices(running.groups) if m.stepped]
        for fqn, start, part in (*lasting, *((fqn, part.start, part.data) for fqn, part in self.kept.items())):
            if fqn in leaves:
                continue
            parameter = self.parameters[fqn]
            yield SeenParameter(fqn, parameter, parameter.detach().reshape(-1)[start : start + part.numel()], part)

    def start_write_check(self, running: RunningEngine, strategy: str) -> ExternalWriteCheck:
        """Start the check of a fit under ``strategy``. All ranks call it."""
        names = {parameter: fqn for fqn, parameter in self.parameters.items()}
        units = flat_layout.gathered_parameters(self._module) if running.stage == 3 else {}
        self._inside = {unit: [(names[p], p) for p in parameters] for unit, parameters in units.items()}
        check = ExternalWriteCheck(strategy, partial(self.copies_in_module, running), self._inside)
        check.undo_stack.callback(flat_layout.watch_releases(names, check.accept_own_release))
        check.accept_own_writes()
        return check

    @torch.no_grad()
    def refresh_module(self, running: RunningEngine | None, *, device: torch.device) -> None:
        """Let forward see values that were written from outside. All ranks call it."""
        for parameter, data in self._rounded.values():
            parameter.data = data.to(parameter.dtype)
        if running is None:
            return
        parameters: dict[str, Any] = dict(self.parameters)
        for fqn, tensor in self._frozen_tensors().items():
            if flat_layout.is_partitioned(parameters[fqn]):
                values = self.kept[fqn].data
                swapping.live_shard(parameters[fqn])[: values.numel()].copy_(values)
            else:
                parameters[fqn].copy_(gather_full(tensor, device=device))
        running.refresh_parameters()

    @torch.no_grad()
    def give_back(self, running: RunningEngine, *, device: torch.device, communicate: bool) -> None:
        """Give the module full values, or shards with masters. Without ``communicate`` rounded ones stay."""
        if running.stage == 3:
            # Masters mapped from files stay so. Others are copied to the host: the engine's are still on the device.
            in_files = {m.fqn for group in running.groups if group.new_slot is not None for m in group.members}
            masters = {
                member.fqn: FlatSlice(part if member.fqn in in_files else part.to("cpu", copy=True), member.start)
                for member, part in flat_layout.master_slices(running.groups)
                if member.stepped
            }
            self._module.__dict__[_MASTERS] = {**self.kept, **masters}
        elif communicate:
            for fqn, tensor in {**flat_layout.master_tensors(running.groups), **self._frozen_tensors()}.items():
                self.parameters[fqn].data = gather_full(tensor, device=device).cpu()

    def round_parameters(self, compute: torch.dtype) -> None:
        """Cast the parameters but 0-d ones for an evaluation without an engine, until `restore_rounded`."""
        for fqn, parameter in self.parameters.items():
            if parameter.is_floating_point() and parameter.dtype != compute and parameter.ndim > 0:
                self._rounded[fqn] = parameter, parameter.data
                parameter.data = parameter.data.to(compute)

    def restore_rounded(self) -> None:
        while self._rounded:
            _, (parameter, data) = self._rounded.popitem()
            parameter.data = data


def partition_module(
    root: nn.Module, *, device: torch.device, compute: torch.dtype, seed: int, config: Mapping[str, Any]
) -> LoadedSlices:
    """Shard every parameter under ``root`` and move its buffers. All ranks call it.

    Parameters that an earlier run or ``zero.Init`` has sharded are only cast. Others get rank 0's values. On the meta
    device values follow from ``seed``. Returns this rank's shards, on the host, of parameters that the cast to
    ``compute`` rounds. MaterializationError is raised before any is touched.
    """
    import deepspeed

    materializer = Materializer(root, device=device, seed=seed)
    names = parameter_names(root)
    # True by default if DeepSpeed shards by itself. Here only if the configuration says so.
    zero = {"memory_efficient_linear": False, **config["zero_optimization"]}
    own: Any = {"config_dict_or_path": {**config, "zero_optimization": zero}, "dtype": compute}
    own["zero_param_parallel_group"] = existing_hpz_group(zero.get("zero_hpz_partition_size", 1))
    init = deepspeed.zero.Init(nn.Module(), **own)  # Of no parameters: they are sharded below.
    swapping.deduplicate_reads(init.param_swapper)
    loaded: LoadedSlices = {}
    for module, fqn in materializer.fqns.items():
        materializer.fill([module])
        for name, parameter in module.named_parameters(recurse=False):
            # A parameter from the meta device was replaced.
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
    parameter: Any, fqn: str, device: torch.device, compute: torch.dtype, init: Any, loaded: LoadedSlices
) -> None:
    is_sharded = flat_layout.is_partitioned(parameter)
    if is_sharded:
        swapping.take_shard(parameter)
    else:
        parameter.data = parameter.data.to(device)
        broadcast_from_rank_0([parameter])
    before = (parameter.ds_tensor if is_sharded else parameter).detach()
    if before.is_floating_point():
        for tensor in (parameter, parameter.ds_tensor) if is_sharded else (parameter,):
            tensor.data = tensor.data.to(compute)
    if is_sharded:
        swapping.give_shard(parameter, init.param_swapper)
    else:
        # Without the broadcast of `Init`, which fails for 0-d parameters.
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
    if is_kept(parameter, before, compute):
        start, length = flat_layout.own_range(parameter)
        own = before[:length] if is_sharded else before.reshape(-1)[start : start + length]
        loaded[fqn] = FlatSlice(own.to("cpu", copy=True), start)
