"""Filling a ledger in the course of a run's start and first step.

The collectives that reduce gradients pass the dispatcher as ``c10d`` or ``_c10d_functional`` operators, communication
hooks' and those of DistributedDataParallel's reducer in C++ too; autograd hands the mode on to its threads. Not seen: a
library that calls NCCL or MPI itself, and DTensor's own collectives, which run below a DTensor's operator.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.precision import casting
from lightning_shard.precision.float8 import multiplies_in
from lightning_shard.precision.ledger.record import STATE, Entry, Kind, Ledger, Reduction
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import outside_graphs, parameter_names
from lightning_shard.tensors.tracing import Watching, tree_leaves

Owned = tuple[nn.Module, str]  # A module, and the name of a parameter of its own.
Named = Iterable[tuple[str, Tensor]]


class Recorder:
    """Reads the dtypes of a module, its gradients and its optimizers, without communication. `tensors` may be called at
    any time; hooks, which change no number, are there from `start` to `stop`.
    """

    def __init__(self, root: nn.Module, *, stepped: Callable[[Optimizer], Named | None] = lambda _: None) -> None:
        """``root`` is the unwrapped LightningModule; ``stepped``: FQN and master, where the engine casts parameters."""
        self._root = root
        self._masters = stepped
        self._entries: dict[str, Entry] = {}
        self._reductions: list[Reduction] = []
        self._losses: set[torch.dtype] = set()
        self._forward: dict[Owned, torch.dtype] = {}
        self._backward: dict[Owned, torch.dtype] = {}
        self._products: dict[Owned, torch.dtype] = {}
        self._fqns: dict[Owned, str] = {}
        self._undo: list[Callable[[], None]] = []
        self._watched: dict[int, Tensor] = {}
        self._last = ""
        self._optimizers: list[Optimizer] = []
        self._stepped: list[Optimizer] = []

    def tensors(self, stage: str) -> None:
        steps_masters = any(self._masters(optimizer) is not None for optimizer in self._optimizers)
        for name, kind, tensor in _named_tensors(self._root):
            entry = self._entries.setdefault(name, Entry(kind=kind))
            if stage != "loaded" and kind in ("trainable", "frozen") and steps_masters:
                continue
            # A step of several optimizers switches the parameters of the others off for a while.
            if stage != "step" or kind == "trainable":
                entry.kind = kind
            entry.add(stage, tensor.dtype)

    def groups(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            for name, parameter in self._parameters(optimizer):
                self._add(name, "optimizer", parameter)

    def held(self, gradients: Mapping[str, LiveTensor]) -> None:
        """Note the dtype of gradients, by their parameters' FQNs, that wait for those of further micro-batches."""
        for name, gradient in gradients.items():
            self._add(name, "accumulated", gradient)

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        masters = self._masters(optimizer)
        if masters is not None:
            yield from masters
            return
        names, index = parameter_names(self._root), self._optimizers.index(optimizer)
        for group, settings in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(settings["params"]):
                yield names.get(parameter, f"optimizer {index}, group {group}, parameter {position}"), parameter

    def _add(self, name: str, stage: str, tensor: LiveTensor) -> None:
        self._entries.setdefault(name, Entry(kind="not in the module")).add(stage, tensor.dtype)

    @property
    def recording(self) -> bool:
        return bool(self._undo)

    def start(self) -> None:
        names = parameter_names(self._root)
        for module in self._root.modules():
            for attribute, parameter in _own(module):
                if _counts(parameter):
                    self._fqns[module, attribute] = names[parameter]
        self._outside = set(outside_graphs(self._root))
        for module in self._outside:
            # Functions: a copy of the module, as MetricTracker makes some, would copy what a method is bound to.
            self._undo.append(module.register_forward_pre_hook(lambda module, _: self._see(module)).remove)
            # Ahead of ZeRO-3's hook, which reshards what the module has read of modules below it.
            self._undo.append(module.register_forward_hook(lambda *of: self._see_below(of[0]), prepend=True).remove)
        self._undo += [optimizer.register_step_post_hook(self._step).remove for optimizer in self._optimizers]
        casting.OBSERVERS.append(self._see_inside)
        self._undo.append(lambda: casting.OBSERVERS.remove(self._see_inside))

    def stop(self) -> None:
        """Remove the hooks, if they are there; what was seen stays."""
        while self._undo:
            self._undo.pop()()
        for stage, seen in (("forward", self._forward), ("product", self._products), ("backward", self._backward)):
            for owned, dtype in seen.items():
                self._entries[self._fqns[owned]].add(stage, dtype)
        # They keep modules and gathered parameters alive.
        for kept in (self._forward, self._products, self._backward, self._fqns, self._watched):
            kept.clear()

    def _see(self, module: nn.Module) -> None:
        self._see_inside(module)
        # For those that are read by a module around them, or compiled into one. Engines gather others later.
        self._see_below(module)

    def _see_below(self, module: nn.Module) -> None:
        for below in module.modules():
            if below not in self._outside:
                self._see_product(below)
            for attribute, parameter in _own(below):
                # Not by getattr: a sharded parameter that is read in a forward is what ZeRO-3, and FSDP of an embedding
                # or a head, from then on gather for the module around, and keep, in every step.
                tensor, status = vars(below).get(attribute, parameter), getattr(parameter, _STATUS, None)
                sharded = isinstance(tensor, DTensor) or (status is not None and status.name != "AVAILABLE")
                if not sharded and (below, attribute) in self._fqns:
                    self._forward.setdefault((below, attribute), tensor.dtype)
                    self._watch((below, attribute), tensor)

    def _see_inside(self, module: nn.Module) -> None:
        """Note how ``module`` sees its own gathered parameters; the last view counts, since that is the innermost."""
        self._see_product(module)
        for attribute, parameter in _own(module):
            if (module, attribute) in self._fqns and not isinstance(parameter, DTensor):
                tensor = getattr(module, attribute)
                self._forward[module, attribute] = tensor.dtype
                self._watch((module, attribute), tensor)

    def _see_product(self, module: nn.Module) -> None:
        """Note a float8 dtype that ``module``, which is being called, rounds its weight to once more."""
        dtype = multiplies_in(module)
        if dtype is not None and (module, "weight") in self._fqns:
            self._products[module, "weight"] = dtype

    def _watch(self, owned: Owned, tensor: Tensor) -> None:
        if not tensor.requires_grad or id(tensor) in self._watched:
            return
        if tensor.is_leaf:
            self._watched[id(tensor)] = tensor

        def note(gradient: Tensor) -> None:
            if self.recording:
                # The first that comes belongs to the innermost view.
                self._backward.setdefault(owned, gradient.dtype)
                self._last = self._fqns[owned]

        handle = tensor.register_hook(note)
        if tensor.is_leaf:
            self._undo.append(handle.remove)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        if not self.recording:
            yield
            return
        self._losses.add(loss.dtype)
        # The root's own parameters are read by its methods, whose calls no hook sees; they are gathered until here.
        self._see_inside(self._root)
        with self.collectives():
            yield

    @contextmanager
    def collectives(self) -> Iterator[None]:
        if not self.recording:
            yield
            return
        with WatchReductions(self._reductions, lambda: self._last):
            yield

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note what ``optimizer`` has stepped; its gradients are still there."""
        for name, parameter in self._parameters(optimizer):
            self._add(name, "step", parameter)
            if parameter.grad is not None:
                self._add(name, "gradient", parameter.grad)
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self._add(name, f"{STATE}{slot}", value)
        self._stepped.append(optimizer)

    def gradients(self) -> None:
        """Note the dtype of the gradients that are there, for a step that failed."""
        for optimizer in self._optimizers:
            for name, parameter in self._parameters(optimizer):
                if parameter.grad is not None:
                    self._add(name, "gradient", parameter.grad)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has made a step: under a loss scale the first ones may be skipped."""
        return any(stepped is optimizer for stepped in self._stepped)

    def finished(self) -> bool:
        """Whether every optimizer has stepped, or one of them has twice."""
        stepped = {id(optimizer) for optimizer in self._stepped}
        return len(stepped) == len(self._optimizers) or len(self._stepped) > len(stepped)

    def ledger(self) -> Ledger:
        return Ledger(entries=self._entries, reductions=tuple(self._reductions), loss=frozenset(self._losses))


_STATUS = "ds_status"  # The mark that ZeRO-3 leaves on a parameter, asked for without importing DeepSpeed.


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    for parameter, name in parameter_names(root).items():
        if _counts(parameter):
            yield name, "trainable" if parameter.requires_grad else "frozen", parameter
    for name, buffer in root.named_buffers():
        yield name, "buffer", buffer
    for fqn, module in root.named_modules():
        if isinstance(module, Metric):
            for state, value in module.metric_state.items():
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, Tensor) and _counts(tensor):
                        yield f"{fqn}.{state}", "metric state", tensor


_NAMESPACES = ("c10d", "_c10d_functional")
_REDUCING = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")
_FSDP = os.path.join("torch", "distributed", "fsdp")
_FUNCTION = os.path.join("torch", "autograd", "function.py")


class WatchReductions(Watching):
    """Notes the dtype of every collective that sums floating tensors; meant to be around backward."""

    def __init__(self, found: list[Reduction], after: Callable[[], str]) -> None:
        """Append to ``found``; ``after`` tells the parameter whose gradient came last."""
        super().__init__()
        self._found, self._after = found, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_") if func.namespace in _NAMESPACES else ""
        if name.startswith(_REDUCING) and not _is_of_the_users_function(inspect.currentframe()):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
            for dtype in {t.dtype for t in tensors}:
                numel = max(t.numel() for t in tensors if t.dtype == dtype)
                self._found.append(Reduction(operation=name, dtype=dtype, numel=numel, after=self._after()))
        return func(*args, **(kwargs or {}))


def _is_of_the_users_function(frame: FrameType | None) -> bool:
    """Whether a user's autograd function called it in backward, for activations, as SyncBatchNorm does."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _FSDP in file:
            return False
        if file.endswith(_FUNCTION):
            return True
        frame = frame.f_back
    return False
