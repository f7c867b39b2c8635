"""Casting at module boundaries, the same on every engine.

Under a 16-bit compute dtype every module sees its parameters in that dtype. A forward pre-hook on each module with
parameters, its own or its children's, casts the floating inputs. Integer and boolean inputs, targets, losses and
metric inputs do not enter such modules unless the user's own code sends them there.
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
    """Cast every floating tensor, fp64 too, in ``value``: tuples, lists, dicts, dataclasses and their subclasses (named
    tuples, Hugging Face outputs). A container without a change is returned itself, so that a module can still write to
    it. A tensor that occurs twice is cast once, as ``nn.MultiheadAttention`` requires.
    """
    done: dict[Tensor, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if tensor not in done:
            done[tensor] = tensor.to(dtype)
        return done[tensor]

    return map_tensors(value, lambda tensor: tensor.is_floating_point() and tensor.dtype != dtype, cast)


# Written for torch.compile, which breaks a graph at a comprehension that names its results and at `is` between
# containers.
def map_tensors(value: Any, wants: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``make`` of each wanted tensor in it, or ``value`` itself. Containers are `cast_floating`'s."""
    if isinstance(value, Tensor):
        return make(value) if wants(value) else value
    if not _holds(value, wants):
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(item, wants, make) for item in value]
        return getattr(value, "_make", type(value))(items)
    changed = copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            changed[key] = map_tensors(item, wants, make)
        return changed
    for field in fields(value):
        # Frozen dataclasses refuse a plain assignment.
        object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), wants, make))
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
    """Cast the floating inputs of every module with floating parameters below ``root`` to ``dtype``, or to another
    dtype from ``inside``. Returns the undo. ``root`` itself, whose methods are the user's code, and torchmetrics are
    left out. Modules with running statistics compute in fp32. Parameters of ``whole`` modules, which no engine casts,
    are cast for their forward. ``root``'s own code receives floating outputs in ``output`` (None: as computed), while
    modules pass ``dtype`` to each other. Modules of ``float8`` multiply in float8.
    """
    for name, module in root.named_modules():
        if _in_fp32_alone(module):
            raise PrecisionError(
                f"{name} has a spectral norm or an orthogonal parametrization, whose fp32 buffers don't take "
                f"weights in {dtype}. Use precision '32-true', or ShardPrecision('bf16-mixed', autocast=True)."
            )
    undo = ExitStack()
    others = inside or {}
    hooks = {to: _casting_to(to) for to in {dtype, *others.values()}}
    left_out = {root} | {m for metric in root.modules() if isinstance(metric, Metric) for m in metric.modules()}
    for module in root.modules():
        if module in left_out:
            continue
        if isinstance(module, STATISTICS) and module.running_mean is not None:
            # torch refuses 16-bit weights with fp32 running statistics, and 16-bit statistics would drift. Its kernels
            # take 16-bit inputs with fp32 weights, compute in fp32, keep the 16-bit input for backward, and return its
            # dtype.
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


def _in_fp32_alone(module: nn.Module) -> bool:
    """Whether ``module`` is a parametrization that torch computes in fp32 or with fp32 buffers."""
    vectors = {key for key, _ in module.named_buffers(recurse=False) if key.endswith("_u")}
    if "_u" in vectors or any(hasattr(module, f"{key[:-2]}_orig") for key in vectors):
        return True  # a spectral norm
    chart = getattr(module, "orthogonal_map", None)
    return chart is not None and (hasattr(module, "base") or chart.name != "matrix_exp")


def widen_statistics(root: nn.Module) -> None:
    """Cast 16-bit running statistics, and buffers of parametrizations that need fp32 weights, to fp32, as masters are.
    torch refuses 16-bit ones with fp32 weights, and they would drift.
    """
    for module in root.modules():
        if isinstance(module, STATISTICS) or _in_fp32_alone(module):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point() and buffer.itemsize < 4:
                    buffer.data = buffer.data.float()


def _casting_to(dtype: torch.dtype) -> Callable[..., Any]:
    def pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype == dtype:
            return None  # the most frequent call, whose host time counts
        return cast_floating((args, kwargs), dtype)

    return pre_hook


def _callable_by(module: nn.Module, *, is_root: bool = True) -> Iterator[nn.Module]:
    """Modules that a root's own code may call, also from its ModuleLists and ModuleDicts."""
    for child in module.children():
        holds = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if not holds:
            yield child
        goes_on = is_root if holds else not isinstance(child, nn.Sequential)
        if goes_on:
            yield from _callable_by(child, is_root=holds)


_depth = 0  # Number of modules with a cast output that are being called, one inside the other.
_autocast: dict[str, bool] = {}  # Device type to whether autocast was on at the call of the outermost of them.
_LEAVING = 2**62  # The id of the hook after a module's call. No other hook has it.


def in_backward() -> bool:
    """Whether a backward pass runs. ``torch.utils.checkpoint`` calls modules again in it."""
    return _current_graph_task_id() != -1


def _cast_output(module: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
    """Cast the output of calls that come from no other module, and switch autocast off inside. A call repeated by
    ``torch.utils.checkpoint`` has the caller that it had in forward. A compiler only sees calls inside of a module.
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
    # Compiled code guards the ids of hooks that are always called. Another id for each module would recompile each of a
    # unit's copies.
    RemovableHandle.next_id, following = _LEAVING, RemovableHandle.next_id
    try:
        undo.callback(module.register_forward_hook(leave, always_call=True).remove)
    finally:
        RemovableHandle.next_id = following


def _cast_returned(output: Any, dtype: torch.dtype) -> Any:
    """``output`` in ``dtype``. In a dictionary with a loss, as of Hugging Face's models, only the loss is cast: copies
    of unread logits would be the largest tensors of a step.
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
    """``function`` with its calls of modules counted as calls from a module, at any place, such as in backward."""

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
    """Run ``module`` with its parameters and its submodules', as currently seen, in ``dtype``. 0-d ones keep theirs.
    Returns the undo.
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


@contextmanager
def _seen_in(places: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> Iterator[None]:
    """Let ``owner.<name>`` of each place give the parameter in ``dtype``, with gradients to the original."""
    hidden: list[tuple[dict[str, Any], str, Tensor | None]] = []
    try:
        for owner, name in places:
            if (seen := getattr(owner, name, None)) is not None:
                hidden.append((owner.__dict__, name, owner.__dict__.get(name)))
                # An instance attribute hides the registered parameter. It may replace an outer call's attribute.
                owner.__dict__[name] = seen.to(dtype)
        yield
    finally:
        for attributes, name, before in reversed(hidden):
            attributes.pop(name, None)
            if before is not None:
                attributes[name] = before


OWN_FORWARD = "_shard_own_forward"
"""Attribute with the ``forward`` of a module's instance, or None, while it is replaced."""


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the module's ``forward``. Returns the undo."""
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
    before an optimizer is built and before FSDP's lazy initialisation. Returns FQN and old dtype of the changed ones.
    fp64 stays: engines without such masters refuse it.
    """
    names = parameter_names(root)
    left = (dtype, torch.float64)
    cast = {p for p in names if p.requires_grad and p.is_floating_point() and p.dtype not in left}
    replace_tensors(root, lambda tensor: tensor.detach().to(dtype) if tensor in cast else tensor)
    return {name: parameter.dtype for parameter, name in names.items() if parameter in cast}
