"""Casting at module boundaries, the same on every engine.

Under a 16-bit compute dtype every module sees its parameters in that dtype, and a forward pre-hook on each that has
some, of its own or its children's, casts its floating inputs. Integer and boolean inputs, targets, losses and metric
inputs do not enter such modules unless the user's own code sends them there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id  # which backward pass runs, as torch.utils.checkpoint asks
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_shard.devices import types
from lightning_shard.errors import PrecisionError
from lightning_shard.precision.float8 import Float8, install_float8
from lightning_shard.tensors.names import parameter_names, replace_tensors

STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that may have running statistics."""


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it, fp64 too, in ``dtype``, of tuples, lists, dicts, dataclasses and
    their subclasses (named tuples, Hugging Face outputs). A container in which nothing changes is itself returned, so
    that a module can still write to it. A tensor that occurs twice is cast once: ``nn.MultiheadAttention`` asks for it.
    """
    done: dict[Tensor, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = tensor.to(dtype)
        return done[tensor]

    return rebuilt(value, lambda tensor: tensor.is_floating_point() and tensor.dtype != dtype, cast)


# Written so that torch.compile can follow: it breaks a graph at a comprehension that names what it computes, and at
# `is` between containers.
def rebuilt(value: Any, wants: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with what ``make`` gives for each wanted tensor in it, or itself; containers as of `cast_floating`."""
    if isinstance(value, Tensor):
        return make(value) if wants(value) else value
    if not _holds(value, wants):
        return value
    if isinstance(value, tuple | list):
        items = [rebuilt(item, wants, make) for item in value]
        return getattr(value, "_make", type(value))(items)
    changed = copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            changed[key] = rebuilt(item, wants, make)
        return changed
    for field in fields(value):
        # Frozen dataclasses refuse the plain way.
        object.__setattr__(changed, field.name, rebuilt(getattr(value, field.name), wants, make))
    return changed


def _holds(value: Any, wants: Callable[[Tensor], bool]) -> bool:
    if isinstance(value, Tensor):
        return wants(value)
    if isinstance(value, tuple | list):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, f.name) for f in fields(value)]
    else:
        return False
    return any(_holds(item, wants) for item in items)


def install_casts(
    root: nn.Module,
    dtype: torch.dtype,
    *,
    inside: Mapping[nn.Module, torch.dtype] | None = None,
    whole: Iterable[nn.Module] = (),
    output: torch.dtype | None = None,
    float8: Float8 | None = None,
) -> Callable[[], None]:
    """Cast the floating inputs of every module below ``root`` that has floating parameters to ``dtype``; the result
    takes it back. Some modules have another dtype, ``inside``. ``root`` itself, whose methods are the user's code, and
    torchmetrics are left out. Modules with running statistics compute in fp32. Parameters of ``whole`` modules, which
    no engine casts, are cast for their forward. ``output`` is what ``root``'s own code receives floating outputs of
    modules in (None: as computed); between modules ``dtype`` stays. ``float8``: which modules multiply in float8.
    """
    for name, module in root.named_modules():
        if what := _in_fp32_alone(module):
            raise PrecisionError(
                f"{name} has {what} weights in {dtype}. "
                "Use precision '32-true', or ShardPrecision(precision='bf16-mixed', autocast=True)."
            )
    undo = ExitStack()
    others = inside or {}
    hooks = {to: _casting_to(to) for to in {dtype, *others.values()}}
    left_out = {root} | {m for metric in root.modules() if isinstance(metric, Metric) for m in metric.modules()}
    for module in root.modules():
        if module in left_out:
            continue
        if isinstance(module, STATISTICS) and module.running_mean is not None:
            # torch refuses 16-bit weights together with fp32 running statistics, and 16-bit statistics would drift. Its
            # kernels take 16-bit inputs with fp32 weights, compute in fp32, keep the input as it is for backward, and
            # return its dtype.
            undo.callback(compute_in(module, torch.float32))
        elif any(p.is_floating_point() for p in module.parameters()):
            hook = hooks[others.get(module, dtype)]
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for module in whole:
        if module not in left_out:
            undo.callback(compute_in(module, dtype))
    if float8 is not None:
        undo.callback(install_float8(root, float8, left_out | {m for m, to in others.items() if to != dtype}))
    if output is not None and {output} != {dtype, *others.values()}:
        for module in dict.fromkeys(_callable_by(root)):
            if module not in left_out:
                _cast_output(module, output, undo)
    return undo.close


def _in_fp32_alone(module: nn.Module) -> str:
    """What of a parametrization in ``module`` torch computes in fp32, or with fp32 buffers; empty: there is none."""
    vectors = {key for key, _ in module.named_buffers(recurse=False) if key.endswith("_u")}
    if "_u" in vectors or any(hasattr(module, f"{key[:-2]}_orig") for key in vectors):
        return "a spectral norm, whose vectors are fp32 and can't be multiplied with"
    chart = getattr(module, "orthogonal_map", None)
    if chart is not None and (hasattr(module, "base") or chart.name != "matrix_exp"):
        return "an orthogonal parametrization, whose base is fp32 and whose kernels don't take"
    return ""


def widen_statistics(root: nn.Module) -> None:
    """Put running statistics, and the buffers of parametrizations that compute with fp32 weights alone, into fp32 where
    they were loaded in 16 bits, as masters are: torch refuses 16-bit ones beside fp32 weights, and they would drift.
    """
    for module in root.modules():
        if isinstance(module, STATISTICS) or _in_fp32_alone(module):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point() and buffer.itemsize < 4:
                    buffer.data = buffer.data.float()


def _casting_to(dtype: torch.dtype) -> Callable[..., Any]:
    def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype == dtype:
            return None  # of every call of most layers, whose host time counts
        return cast_floating((args, kwargs), dtype)

    return pre_hook


def _callable_by(module: nn.Module, *, is_root: bool = True) -> Iterator[nn.Module]:
    """The modules that a root's own code may call: all but those in containers of the modules that it holds."""
    for child in module.children():
        holds = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not holds:
            yield child
        goes_on = is_root if holds else not isinstance(child, nn.Sequential)
        if goes_on:
            yield from _callable_by(child, is_root=holds)


_depth = 0  # How many modules with a cast output are being called, one inside the other.
_autocast: dict[str, bool] = {}  # Device type to whether autocast was on where the outermost of them was called.


_LEAVING = 2**62  # The number of the hook after a module's call, which no other hook has.


def in_backward() -> bool:
    """Whether a backward pass runs, in which ``torch.utils.checkpoint`` calls modules again."""
    return _current_graph_task_id() != -1


def _cast_output(module: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
    """Cast the output of calls from no other module, and switch autocast off inside. What ``torch.utils.checkpoint``
    calls again comes from where it came from in forward; a compiler only sees calls inside of a module.
    """
    nested, again = False, False

    def enter(module: nn.Module, args: Any) -> None:
        global _depth
        nonlocal nested, again
        if torch.compiler.is_compiling():
            return
        if not (recomputed := in_backward()):
            nested = _depth > 0
        if _depth == 0:
            again = recomputed and nested
        if _depth == 0 and not again:
            for device in types():
                if torch.is_autocast_enabled(device):
                    torch.set_autocast_enabled(device, False)
                    _autocast[device] = True
        _depth += 1

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        global _depth
        if torch.compiler.is_compiling():
            return None
        _depth -= 1
        if _depth > 0 or again:
            return None
        while _autocast:
            torch.set_autocast_enabled(*_autocast.popitem())
        return _cast_returned(output, dtype)

    undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
    # Compiled code looks for the numbers of hooks that are always called; another one for each module would have each
    # of a unit's copies compiled anew.
    RemovableHandle.next_id, following = _LEAVING, RemovableHandle.next_id
    try:
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
    finally:
        RemovableHandle.next_id = following


def _cast_returned(output: Any, dtype: torch.dtype) -> Any:
    """``output`` in ``dtype``; of a dictionary with a loss, as Hugging Face's models return, the loss alone: copies of
    logits that nobody reads would be the largest tensors of a step.
    """
    loss = output.get("loss") if isinstance(output, dict) else None
    if not isinstance(loss, Tensor) or loss.ndim > 0 or not loss.is_floating_point():
        return cast_floating(output, dtype)
    if loss.dtype == dtype:
        return output
    changed = copy(output)
    changed["loss"] = loss.to(dtype)
    return changed


def inside_modules(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls of modules come from a module wherever it is called, such as in backward."""

    def nested(*args: Any, **kwargs: Any) -> Any:
        global _depth
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1

    return nested


def compute_in(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Run ``module`` on its parameters, and those of the modules in it, as they are seen, in ``dtype``, but for 0-d
    ones, which keep theirs.
    """
    places = [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_floating_point() and parameter.ndim > 0
    ]
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _seen_in(places, dtype):
            return original(*args, **kwargs)

    return replace_forward(module, forward)


Places = Sequence[tuple[nn.Module, str]]
"""Modules with the name of a parameter in each, listed ahead of steps, which may find others in these places."""


@contextmanager
def _seen_in(places: Places, dtype: torch.dtype) -> Iterator[None]:
    """Let ``owner.<name>`` give the parameters in ``places`` in ``dtype``, with gradients to the original."""
    hidden: list[tuple[dict[str, Any], str, Tensor | None]] = []
    try:
        for owner, name in places:
            if (seen := getattr(owner, name, None)) is not None:
                hidden.append((owner.__dict__, name, owner.__dict__.get(name)))
                # An instance attribute hides the registered parameter; here maybe one that an outer call hid.
                owner.__dict__[name] = seen.to(dtype)
        yield
    finally:
        for attributes, name, before in reversed(hidden):
            attributes.pop(name, None)
            if before is not None:
                attributes[name] = before


OWN_FORWARD = "_shard_own_forward"
"""Where a module keeps the ``forward`` that was set on itself, or None, while another is in its place."""


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Put ``forward`` in the place of the module's own; returns a function that puts back what was there."""
    before = module.__dict__.get("forward")
    is_first = OWN_FORWARD not in module.__dict__
    module.__dict__.setdefault(OWN_FORWARD, before)
    module.forward = forward

    def undo() -> None:
        module.__dict__.pop("forward", None)
        if is_first:
            module.__dict__.pop(OWN_FORWARD, None)
        if before is not None:
            module.forward = before

    return undo


def cast_trainable_parameters(root: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Replace every trainable floating parameter under ``root``, plain or DTensor, by one of ``dtype``, ties kept,
    before an optimizer is built and before FSDP's lazy initialisation. FQN and old dtype of those that changed. Those
    in fp64, which engines that have no such masters refuse, stay.
    """
    names = parameter_names(root)
    left = (dtype, torch.float64)
    cast = {p for p in names if p.requires_grad and p.is_floating_point() and p.dtype not in left}
    replace_tensors(root, lambda tensor: tensor.detach().to(dtype) if tensor in cast else tensor)
    return {name: parameter.dtype for parameter, name in names.items() if parameter in cast}
