"""One training step of a module on tensors without data: activations by shard unit, and the time of its operators.

The step runs once, for all engines and numbers of ranks: the full module, with the casts and checkpointing that every
engine here installs. What an engine holds beside it is arithmetic (`lightning_shard.planning.step_memory`).
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_shard.cluster.traces import user_frame
from lightning_shard.engines.activation_offload import HostInputs
from lightning_shard.engines.transforms import Checkpointing, checkpoint_forward, checkpointed_modules
from lightning_shard.engines.units import Unit, computes
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters.flops import NoAttentionDropout, NumbersReadAsOne
from lightning_shard.planning.operators import Device, OperatorTimes, Work
from lightning_shard.precision.casting import install_casts
from lightning_shard.precision.policy import PrecisionPolicy, autocasting
from lightning_shard.tensors import fake
from lightning_shard.tensors.names import replace_tensors
from lightning_shard.tensors.tracing import READ_NUMBER, storage_key, tree_leaves, tree_map, tree_map_only
from lightning_shard.text import first_line


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The activations of one training step, of one micro-batch."""

    segments: "tuple[Segment, ...]"  # In the order of the step.
    batch_size: int  # Samples per rank and micro-batch.
    # In order: the segment's index, a storage's key, and its bytes, or 0 where it is freed or a gradient that an engine
    # takes. Empty where the trace is computed from others.
    events: tuple[tuple[int, int, int], ...] = ()
    work: tuple[Work, ...] = ()  # Of each segment, on the device of the `Step`; empty without one.

    @property
    def parts(self) -> list[tuple[str, str, bool]]:
        """What two traces have in common between which every part is a line."""
        return [(s.phase, s.unit, s.has_gradients) for s in self.segments]

    @property
    def order(self) -> tuple[str, ...]:
        """The units in the order in which forward first reaches them, the root's "" left out."""
        return tuple(dict.fromkeys(s.unit for s in self.segments if s.phase == "forward" and s.unit))


class TraceError(ConfigurationError):
    """A step that can't be traced; the message names the operation, and where in the user's code it is."""


@dataclass(frozen=True, kw_only=True)
class Step:
    training_step: Callable[[Any], Any]  # ``(batch) -> loss``, or to a mapping with ``loss``.
    batch: Any  # The first batch of the user's data: tensors on the CPU in any nesting.
    units: Sequence[Unit] = ()
    checkpointing: Checkpointing = None
    device: Device | None = None  # Whose time for the operators is counted; None: no time is.


def trace_step(root: nn.Module, step: Step, policy: PrecisionPolicy, mode: Any, batch_size: int | None = None) -> Trace:
    """Run one step of a module whose tensors `fake.make_fake` has made fake, on the batch or on so many samples of it.
    TraceError: it depends on data, has an operation without a fake implementation, or fails.
    """
    size = batch_size or batch_size_of(step.batch)
    with ExitStack() as stack:
        dtypes = computes(step.units, policy.compute)
        stack.callback(cast_parameters(root, policy.compute, dtypes))
        if {policy.compute, *dtypes.values()} != {torch.float32}:
            stack.callback(install_casts(root, policy.compute, inside=dtypes, output=policy.output))
        live = LiveBytes([*root.parameters(), *root.buffers()])
        inputs = _PlannedInputs(live)
        for module in checkpointed_modules(root, list(step.units), step.checkpointing):
            stack.callback(checkpoint_forward(module, step.checkpointing, inputs))
        times = None if step.device is None else OperatorTimes(step.device, lambda: len(live.segments) - 1)
        hooks = _UnitHooks(root, step.units, live)
        for handle in hooks.handles:
            stack.callback(handle.remove)
        root.train()
        try:
            with mode:
                batch = resized(tree_map_only(Tensor, lambda t: fake.as_fake(t, mode), step.batch), size)
                live.track(batch)
                with NoAttentionDropout(), live, times or nullcontext():
                    live.begin("forward", "")
                    with autocasting(policy, "cpu", cache=True):
                        loss = _loss(step.training_step(batch))
                    hooks.backward = True
                    live.begin("backward", "")
                    loss.backward()
                    live.finish()
        except Exception as error:
            raise TraceError(explained(error, live.last_operation)) from error
        finally:
            root.zero_grad(set_to_none=True)
    work = () if times is None else tuple(times.parts[i] for i in range(len(live.segments)))
    return Trace(segments=tuple(live.segments), batch_size=size, events=tuple(live.events), work=work)


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"training_step returned {type(loss).__name__}, and not a loss")
    return loss


class _OnHost:
    """In the place of a copy, which would count as a tensor of the device."""

    def __init__(self, tensor: Tensor, live: "LiveBytes") -> None:
        size, stride = tensor.shape, tensor.stride()
        self.new = partial(torch.empty_strided, size, stride, dtype=tensor.dtype)
        self.stride = lambda: stride
        live.offloaded += tensor.nbytes
        weakref.finalize(self, live.take_back, tensor.nbytes)


class _PlannedInputs(HostInputs):
    """Counts what is copied to the host, of tensors without data."""

    def __init__(self, live: "LiveBytes") -> None:
        super().__init__()
        self._live = live

    def on_host(self, tensor: Tensor) -> Any:
        return _OnHost(tensor, self._live)

    def on_device(self, host: Any) -> Tensor:
        made: Tensor = host.new()
        return made

    def copy(self, to: Any, source: Any) -> None:
        """Nothing."""


class _UnitHooks:
    """Tells where in a step each operation is, and frees the gradients of a unit once it has all of them."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], live: "LiveBytes") -> None:
        self.live, self.backward = live, False
        self.inside: list[str] = []
        self.complete: list[str] = []
        self.handles: list[Any] = []
        for unit in units:
            self.handles.append(unit.module.register_forward_pre_hook(partial(self._enter, unit.name), prepend=True))
            self.handles.append(unit.module.register_forward_hook(partial(self._leave, unit.name), always_call=True))
        self.missing: dict[str, set[int]] = defaultdict(set)
        self.parameters: dict[str, list[Tensor]] = defaultdict(list)
        unit_of = unit_names(units)
        for parameter in (p for p in root.parameters() if p.requires_grad):
            name = unit_of.get(id(parameter), "")
            self.missing[name].add(id(parameter))
            self.parameters[name].append(parameter)
            self.handles.append(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name)))

    def _enter(self, unit: str, module: nn.Module, args: Any) -> None:
        if not self.backward:
            self.inside.append(unit)
            self.live.begin("forward", unit)

    def _leave(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.backward or not self.inside:
            return
        self.inside.pop()
        self.live.begin("forward", self.inside[-1] if self.inside else "")
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.live.begin("backward", unit))

    def _accumulated(self, unit: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.live.gradient(parameter.grad)
        self.missing[unit].discard(id(parameter))
        if self.missing[unit] or unit in self.complete:
            return
        self.live.note()
        segment = self.live.segments[-1]
        # The engines reduce them here; which of them they keep is arithmetic.
        segment.at_reduction = max(segment.at_reduction, self.live.activations + self.live.gradients)
        for own in self.parameters[unit]:
            own.grad = None
        self.complete.append(unit)
        segment.complete = tuple(self.complete)
        if unit:
            self.live.begin("backward", "")
            self.live.segments[-1].complete = tuple(self.complete)


def unit_names(units: Sequence[Unit]) -> dict[int, str]:
    """Parameters' ids to the name of the first shard unit that they are in."""
    return {id(parameter): unit.name for unit in reversed(units) for parameter in unit.module.parameters()}


def cast_parameters(
    root: nn.Module, compute: torch.dtype, inside: Mapping[nn.Module, torch.dtype]
) -> Callable[[], None]:
    """Replace every floating parameter by one of dtype ``compute``, or of its module's, ``inside``, until undone."""
    others = {id(p): dtype for module, dtype in inside.items() for p in module.parameters(recurse=False)}

    def cast(tensor: Tensor) -> Tensor:
        dtype = others.get(id(tensor), compute)
        own = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dtype != dtype
        return tensor.detach().to(dtype) if own else tensor

    return replace_tensors(root, cast)


def batch_size_of(batch: Any) -> int:
    """Samples of a batch: the length of the first tensor in it that has one."""
    return next((t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), 1)


def resized(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples: repeated, and what is too much left out."""
    own = batch_size_of(batch)

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != own or size == own:
            return value
        return value.repeat(-(-size // own), *[1] * (value.ndim - 1))[:size]

    return tree_map(repeated, batch)


def explained(error: BaseException, operation: str) -> str:
    """What failed, where, and, where that is the reason, that there is no data."""
    at = f", at {place}" if (place := user_frame(error)) else ""
    operation = str(getattr(error, "func", operation))
    what = f": operation {operation}" * (isinstance(error, RuntimeError) and bool(operation))
    told = f"the step can't be traced without data{what}{at} ({first_line(error, most=300)})"
    if isinstance(error, DataDependent) or hasattr(error, "func") or "fake impl" in str(error):
        told += ". A size or a branch that depends on values does that, and a kernel without a fake implementation "
        told += "(torch.library.register_fake)"
    return told


Phase = Literal["forward", "backward"]

MEASURES = ("activations", "peak", "peak_gradients", "end_activations", "end_gradients", "at_reduction", "offloaded")
"""The fields of a `Segment` that are bytes."""


@dataclass(kw_only=True)
class Segment:
    """A part of a step in which one shard unit computes; bytes of tensors that the step made. Of gradients those count
    whose unit still lacks others: the tracer frees a full unit's.
    """

    phase: Phase
    unit: str  # The unit; "": code and modules outside of all units.
    activations: int = 0  # The most bytes of activations: of everything but gradients of parameters.
    peak: int = 0  # The most bytes of activations and gradients together.
    peak_gradients: int = 0  # Of ``peak``, the gradients.
    end_activations: int = 0  # Activations when it ends.
    end_gradients: int = 0  # Gradients when it ends.
    offloaded: int = 0  # Inputs of recomputed modules that are on the host when it ends.
    # Activations and gradients when its unit has all of its gradients; 0: that is in another segment.
    at_reduction: int = 0
    complete: tuple[str, ...] = ()  # Units that have all of their gradients when it ends.
    # Whether some parameter has its gradient: before the first one an engine has allocated nothing to reduce it in.
    has_gradients: bool = False

    @property
    def name(self) -> str:
        return f"{self.phase} of {self.unit}" if self.unit else f"{self.phase} outside of units"


class DataDependent(RuntimeError):
    """An operation whose result depends on values, which the tensors of a traced step do not have."""


class LiveBytes(NumbersReadAsOne):
    """Follows every storage from the operation that makes it to its end."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """``known``: tensors that do not count, such as parameters and buffers."""
        super().__init__()
        self._alive: dict[int, tuple[int, Any]] = {}  # Bytes of a storage, and a reference to it.
        self._gradients: set[int] = set()
        self._known = {storage_key(t) for t in known}
        self._has_gradients = False
        self.activations = 0
        self.gradients = 0
        self.offloaded = 0  # Bytes on the host.
        self.segments: list[Segment] = []
        self.events: list[tuple[int, int, int]] = []
        self.last_operation = ""

    def begin(self, phase: Phase, unit: str) -> None:
        if self.segments:
            self.finish()
            if (self.segments[-1].phase, self.segments[-1].unit) == (phase, unit):
                return
        self.segments.append(Segment(phase=phase, unit=unit, has_gradients=self._has_gradients))
        self.note()

    def finish(self) -> None:
        self.segments[-1].end_activations, self.segments[-1].end_gradients = self.activations, self.gradients
        self.segments[-1].offloaded = self.offloaded

    def take_back(self, size: int) -> None:
        """Count ``size`` bytes on the host no more."""
        self.offloaded -= size

    def track(self, tensors: Any) -> None:
        for tensor in (t for t in tree_leaves(tensors) if isinstance(t, Tensor)):
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in self._known and key not in self._alive:
                self._alive[key] = storage.nbytes(), weakref.ref(storage, partial(self._forget, key))
                self.activations += storage.nbytes()
                self._happened(key, storage.nbytes())

    def _happened(self, key: int, size: int) -> None:
        self.events.append((max(0, len(self.segments) - 1), key, size))

    def _forget(self, key: int, _: Any) -> None:
        size, _ = self._alive.pop(key)
        self._happened(key, 0)
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.activations -= size

    def gradient(self, tensor: Tensor) -> None:
        """Count a tensor as a gradient of a parameter from now on; with the first one a segment begins."""
        key = storage_key(tensor)
        if key in self._alive and key not in self._gradients:
            self._gradients.add(key)
            self._happened(key, 0)
            self.activations -= self._alive[key][0]
            self.gradients += self._alive[key][0]
        if not self._has_gradients:
            self._has_gradients = True
            self.finish()
            last = self.segments[-1]
            self.segments.append(Segment(phase=last.phase, unit=last.unit, complete=last.complete, has_gradients=True))
            self.note()

    def note(self) -> None:
        if not self.segments:
            return
        segment = self.segments[-1]
        segment.activations = max(segment.activations, self.activations)
        if self.activations + self.gradients > segment.peak:
            segment.peak, segment.peak_gradients = self.activations + self.gradients, self.gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last_operation = str(func)
        if func is READ_NUMBER and not args[0].is_floating_point():
            raise DataDependent(f"{self.last_operation} reads a number of dtype {args[0].dtype} out of a tensor")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.track(result)
        self.note()
        return result
