"""Run methods other than ``forward`` with FSDP's hooks around them."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_shard.engines._fsdp2 import Units, expect_gradients, gather, leave_out_nested, units_of
from lightning_shard.precision.casting import in_backward
from lightning_shard.tensors.names import outside_graphs

_RUN = "_shard_run"
_DEPTH = "_shard_forward_depth"
_EXPECTS = "_shard_expects_gradients"
_GRADIENTS = "_shard_gradients_taken"


def install_runner(root: nn.Module) -> None:
    """Prepare ``root``, an FSDP module, for `run_as_forward`."""
    if _RUN in root.__dict__:
        return
    root.__dict__[_RUN] = partial(_run_inside, root)
    register_fsdp_forward_method(root, _RUN)
    root.__dict__[_DEPTH] = 0
    root.register_forward_pre_hook(_enter, prepend=True)
    root.register_forward_hook(_leave, always_call=True)
    assert isinstance(root, FSDPModule)
    leave_out_nested(root, _DEPTH)


def _run_inside(root: nn.Module, function: Callable[[], Any]) -> Any:
    if not root.__dict__.get(_EXPECTS):
        # After FSDP's lazy initialisation, which would overwrite it.
        expect_gradients(root)
        root.__dict__[_EXPECTS] = True
    return function()


def _enter(module: nn.Module, *call: Any) -> None:
    module.__dict__[_DEPTH] += 1


def _leave(module: nn.Module, *call: Any) -> None:
    module.__dict__[_DEPTH] -= 1


def run_as_forward(root: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` as ``root.forward``, with its own parameters gathered and backward hooks."""
    _enter(root)
    try:
        # As one partial: FSDP moves all tensors among arguments to its device and copies their containers.
        return root.__dict__[_RUN](partial(function, *args, **kwargs))
    finally:
        _leave(root)


def clear_taken_gradients(root: nn.Module) -> None:
    """Start a step without recorded gradients."""
    root.__dict__[_GRADIENTS] = set()


def note_taken_gradients(root: nn.Module, unit: nn.Module) -> None:
    """Record that gradients are taken through ``unit`` of ``root``."""
    root.__dict__.setdefault(_GRADIENTS, set()).add(unit)


@contextmanager
def gathered_for_gradients(root: nn.Module) -> Generator[None, None, None]:
    """Keep units gathered during a backward pass if gradients were taken through them in the step's forward, such as
    forces. No hook gathers parameters for the graphs of these gradients.
    """
    if not (taken := root.__dict__.pop(_GRADIENTS, ())):
        yield
        return
    modules = [unit for unit in units_of(root) if unit in taken]
    units = Units(modules)
    units.reshard_after_backward(False)
    for unit in modules:
        gather(unit)
    try:
        yield
    finally:
        root.__dict__[_GRADIENTS] = taken
        units.reshard_after_backward(True)
        units.reshard()


def gather_for_calls(root: nn.Module) -> None:
    """Gather the root's own parameters for each module's call, because user hooks call modules one by one. A hook would
    break a graph of the user's ``torch.compile``, so its parameters are gathered for the module around the graph.
    """
    outside = set(outside_graphs(root))

    def visit(module: nn.Module) -> None:
        below = isinstance(module, FSDPModule) and module is not root
        inside = [parameter for child in module.children() if child not in outside for parameter in child.parameters()]
        own = any(isinstance(p, DTensor) for p in (*module.parameters(recurse=False), *inside))
        if module is not root and (own or below):
            module.register_forward_pre_hook(lambda *_: _gather_for_call(root, own=not below), prepend=True)
            module.register_forward_hook(lambda *_: _reshard_outside_steps(root), always_call=True)
        for child in () if below else module.children():
            if child in outside:
                visit(child)

    visit(root)


def patch_methods(root: nn.Module, names: Iterable[str]) -> None:
    """Run methods ``names`` of modules under ``root``, such as ``generate``, with the nearest FSDP module's hooks.
    After a call outside a step all units are resharded, or the next reader would find parameters in the compute dtype.
    """
    names = list(names)

    def visit(module: nn.Module, owner: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            owner = module
            install_runner(module)
        for name in names:
            method = getattr(module, name, None)
            if callable(method) and not isinstance(method, nn.Module) and name not in module.__dict__:
                object.__setattr__(module, name, _redirect(root, owner, method))
        for child in module.children():
            visit(child, owner)

    visit(root, root)
    root.register_forward_hook(lambda *_: _reshard_outside_steps(root), always_call=True)


def _redirect(root: nn.Module, owner: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        # In the owner's own forward its parameters are gathered, and the end of a second pass would free them.
        if owner.__dict__.get(_DEPTH, 0) > 0:
            return method(*args, **kwargs)
        _prepare_outside_steps(root)
        try:
            return run_as_forward(owner, method, *args, **kwargs)
        finally:
            _reshard_outside_steps(root)

    return redirected


def _is_outside_steps(root: nn.Module) -> bool:
    """Whether a module is called outside of a step's forward and of a recomputation in backward."""
    return root.__dict__.get(_DEPTH, 0) == 0 and not in_backward()


def _prepare_outside_steps(root: nn.Module) -> None:
    """Initialise all units by the root, as only FSDP's root can, before a unit is called alone."""
    if not root.__dict__.get(_EXPECTS) and _is_outside_steps(root):
        run_as_forward(root, lambda: None)


def _gather_for_call(root: Any, *, own: bool) -> None:
    """Gather the root's unit before a module is called outside a step. For a module with some of the root's ``own``
    parameters also in a step: a backward pass in manual optimization reshards them.
    """
    if _is_outside_steps(root):
        _prepare_outside_steps(root)
        gather(root)
    elif own and not in_backward():
        gather(root)


def _reshard_outside_steps(root: nn.Module) -> None:
    if _is_outside_steps(root):
        # A later backward pass through the graph gathers them again.
        Units(units_of(root)).reshard()
