"""Trace one training step on tensors without data, for activations by shard unit and the time of operators.

The full module runs one step for all engines and numbers of ranks, with the casts and checkpointing that every engine
installs. The bytes that an engine adds are computed in `lightning_shard.planning.step_memory`.
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
from lightning_shard.engines.units import Unit, compute_dtypes
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
    """The activations of one training step with one micro-batch."""

    segments: "tuple[Segment, ...]"  # In the order of the step.
    batch_size: int  # Samples per rank and micro-batch.
    # In order: the segment's index, a storage's key, and its bytes. Bytes are 0 if it is freed, or becomes a gradient
    # that an engine takes. Empty for a trace that is interpolated from others.
    events: tuple[tuple[int, int, int], ...] = ()
    work: tuple[Work, ...] = ()  # The operators of each segment on the device of `Step`, empty without a device.

    @property
    def parts(self) -> list[tuple[str, str, bool]]:
        """The structure of the trace. Traces of one structure can be interpolated part by part."""
        return [(s.phase, s.unit, s.has_gradients) for s in self.segments]

    @property
    def order(self) -> tuple[str, ...]:
        """The units in the order in which forward first reaches them, without the root's ""."""
        return tuple(dict.fromkeys(s.unit for s in self.segments if s.phase == "forward" and s.unit))


class TraceError(ConfigurationError):
    """A step can't be traced. The message names the operation and its line in the user's code."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step to trace."""

    training_step: Callable[[Any], Any]  # ``(batch) -> loss``, or a mapping with ``loss``.
    batch: Any  # The first batch of the user's data: tensors on the CPU in any nesting.
    units: Sequence[Unit] = ()
    checkpointing: Checkpointing = None
    device: Device | None = None  # The device for the time of operators. None: time is not counted.


def trace_step(root: nn.Module, step: Step, policy: PrecisionPolicy, mode: Any, batch_size: int | None = None) -> Trace:
    """Run one step of a module whose tensors are fake (`fake.make_fake`), on the batch or on ``batch_size`` samples.

    Raises:
        TraceError: the step depends on data, has an operation without a fake implementation, or fails.
    """
    size = batch_size or batch_size_of(step.batch)
    with ExitStack() as stack:
        dtypes = compute_dtypes(step.units, policy.compute)
        stack.callback(cast_parameters(root, policy.compute, dtypes))
        if {policy.compute, *dtypes.values()} != {torch.float32}:
            stack.callback(install_casts(root, policy.compute, inside=dtypes, output=policy.output))
        live = LiveBytes([*root.parameters(), *root.buffers()])
        inputs = _FakeHostInputs(live)
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
                live.track_tensors(batch)
                with NoAttentionDropout(), live, times or nullcontext():
                    live.begin_segment("forward", "")
                    with autocasting(policy, "cpu", cache=True):
                        loss = _loss(step.training_step(batch))
                    hooks.backward = True
                    live.begin_segment("backward", "")
                    loss.backward()
                    live.end_segment()
        except Exception as error:
            raise TraceError(explain_failure(error, live.last_operation)) from error
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
    """Stands in for a host copy, because a fake one would count as a tensor of the device."""

    def __init__(self, tensor: Tensor, live: "LiveBytes") -> None:
        size, stride = tensor.shape, tensor.stride()
        self.new = partial(torch.empty_strided, size, stride, dtype=tensor.dtype)
        self.stride = lambda: stride
        live.offloaded += tensor.nbytes
        weakref.finalize(self, live.free_host_bytes, tensor.nbytes)


class _FakeHostInputs(HostInputs):
    """Counts the bytes of inputs that are offloaded to the host, without copies."""

    def __init__(self, live: "LiveBytes") -> None:
        super().__init__()
        self._live = live

    def on_host(self, tensor: Tensor) -> Any:
        return _OnHost(tensor, self._live)

    def on_device(self, host: Any) -> Tensor:
        made: Tensor = host.new()
        return made

    def copy(self, to: Any, source: Any) -> None:
        """Do nothing: fake tensors have no data."""


class _UnitHooks:
    """Begins a segment for each unit, and frees the gradients of a unit once it has all of them."""

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
            self.live.begin_segment("forward", unit)

    def _leave(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.backward or not self.inside:
            return
        self.inside.pop()
        self.live.begin_segment("forward", self.inside[-1] if self.inside else "")
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.live.begin_segment("backward", unit))

    def _accumulated(self, unit: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.live.count_gradient(parameter.grad)
        self.missing[unit].discard(id(parameter))
        if self.missing[unit] or unit in self.complete:
            return
        self.live.update_peak()
        segment = self.live.segments[-1]
        # Engines reduce the gradients here. Those that they keep are added by arithmetic.
        segment.at_reduction = max(segment.at_reduction, self.live.activations + self.live.gradients)
        for own in self.parameters[unit]:
            own.grad = None
        self.complete.append(unit)
        segment.complete = tuple(self.complete)
        if unit:
            self.live.begin_segment("backward", "")
            self.live.segments[-1].complete = tuple(self.complete)


def unit_names(units: Sequence[Unit]) -> dict[int, str]:
    """The name of the first shard unit that contains a parameter, by the parameter's id."""
    return {id(parameter): unit.name for unit in reversed(units) for parameter in unit.module.parameters()}


def cast_parameters(
    root: nn.Module, compute: torch.dtype, inside: Mapping[nn.Module, torch.dtype]
) -> Callable[[], None]:
    """Replace every floating parameter by one of its module's dtype in ``inside``, or of ``compute``, until undone."""
    others = {id(p): dtype for module, dtype in inside.items() for p in module.parameters(recurse=False)}

    def cast(tensor: Tensor) -> Tensor:
        dtype = others.get(id(tensor), compute)
        own = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dtype != dtype
        return tensor.detach().to(dtype) if own else tensor

    return replace_tensors(root, cast)


def batch_size_of(batch: Any) -> int:
    """Samples of a batch: the size of dim 0 of its first tensor with dims."""
    return next((t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), 1)


def resized(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples: repeated, then cut."""
    own = batch_size_of(batch)

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != own or size == own:
            return value
        return value.repeat(-(-size // own), *[1] * (value.ndim - 1))[:size]

    return tree_map(repeated, batch)


def explain_failure(error: BaseException, operation: str) -> str:
    """A message with the failed operation and its place, and with the rule if missing data is the reason."""
    at = f", at {place}" if (place := user_frame(error)) else ""
    operation = str(getattr(error, "func", operation))
    failed = f": operation {operation}" * (isinstance(error, RuntimeError) and bool(operation))
    message = f"the step can't be traced without data{failed}{at} ({first_line(error, most=300)})"
    if isinstance(error, DataDependent) or hasattr(error, "func") or "fake impl" in str(error):
        message += ". Sizes and branches must not depend on values, and each kernel needs a fake implementation "
        message += "(torch.library.register_fake)"
    return message


Phase = Literal["forward", "backward"]

MEASURES = ("activations", "peak", "peak_gradients", "end_activations", "end_gradients", "at_reduction", "offloaded")
"""The fields of `Segment` that are bytes."""


@dataclass(kw_only=True)
class Segment:
    """A part of a step in which one shard unit computes, with bytes of tensors that the step made.

    Gradients count until their unit has all of them, when the tracer frees them.
    """

    phase: Phase
    unit: str  # "": code and modules outside of all units.
    activations: int = 0  # Peak of activations, which are all tensors but gradients of parameters.
    peak: int = 0  # Peak of activations and gradients together.
    peak_gradients: int = 0  # Gradients at ``peak``.
    end_activations: int = 0  # Activations at the segment's end.
    end_gradients: int = 0  # Gradients at the segment's end.
    offloaded: int = 0  # Inputs of recomputed modules on the host at the segment's end.
    at_reduction: int = 0  # Activations and gradients when the unit gets its last gradient. 0: in another segment.
    complete: tuple[str, ...] = ()  # Units that have all of their gradients at the segment's end.
    has_gradients: bool = False  # Whether any parameter has a gradient. Engines allocate buckets with the first one.

    @property
    def name(self) -> str:
        return f"{self.phase} of {self.unit}" if self.unit else f"{self.phase} outside of units"


class DataDependent(RuntimeError):
    """An operation reads values, which the tensors of a traced step do not have."""


class LiveBytes(NumbersReadAsOne):
    """Counts the bytes of every storage from the operation that makes it until it is freed."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """``known``: tensors that do not count, such as parameters and buffers."""
        super().__init__()
        self._alive: dict[int, tuple[int, Any]] = {}  # Bytes of a storage, and a weak reference to it.
        self._gradients: set[int] = set()
        self._known = {storage_key(t) for t in known}
        self._has_gradients = False
        self.activations = 0
        self.gradients = 0
        self.offloaded = 0  # Bytes on the host.
        self.segments: list[Segment] = []
        self.events: list[tuple[int, int, int]] = []
        self.last_operation = ""

    def begin_segment(self, phase: Phase, unit: str) -> None:
        if self.segments:
            self.end_segment()
            if (self.segments[-1].phase, self.segments[-1].unit) == (phase, unit):
                return
        self.segments.append(Segment(phase=phase, unit=unit, has_gradients=self._has_gradients))
        self.update_peak()

    def end_segment(self) -> None:
        self.segments[-1].end_activations, self.segments[-1].end_gradients = self.activations, self.gradients
        self.segments[-1].offloaded = self.offloaded

    def free_host_bytes(self, size: int) -> None:
        self.offloaded -= size

    def track_tensors(self, tensors: Any) -> None:
        for tensor in (t for t in tree_leaves(tensors) if isinstance(t, Tensor)):
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in self._known and key not in self._alive:
                self._alive[key] = storage.nbytes(), weakref.ref(storage, partial(self._forget, key))
                self.activations += storage.nbytes()
                self._add_event(key, storage.nbytes())

    def _add_event(self, key: int, size: int) -> None:
        self.events.append((max(0, len(self.segments) - 1), key, size))

    def _forget(self, key: int, _: Any) -> None:
        size, _ = self._alive.pop(key)
        self._add_event(key, 0)
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.activations -= size

    def count_gradient(self, tensor: Tensor) -> None:
        """Count a tensor as a parameter's gradient from now on. The first one begins a segment."""
        key = storage_key(tensor)
        if key in self._alive and key not in self._gradients:
            self._gradients.add(key)
            self._add_event(key, 0)
            self.activations -= self._alive[key][0]
            self.gradients += self._alive[key][0]
        if not self._has_gradients:
            self._has_gradients = True
            self.end_segment()
            last = self.segments[-1]
            self.segments.append(Segment(phase=last.phase, unit=last.unit, complete=last.complete, has_gradients=True))
            self.update_peak()

    def update_peak(self) -> None:
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
        self.track_tensors(result)
        self.update_peak()
        return result
