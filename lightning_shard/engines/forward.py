"""Running methods other than ``forward`` with FSDP's hooks around them."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
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
    """Let `run` work on ``root``, an FSDP module."""
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
        # After FSDP's lazy initialisation, which would undo it.
        expect_gradients(root)
        root.__dict__[_EXPECTS] = True
    return function()


def _enter(module: nn.Module, *call: Any) -> None:
    module.__dict__[_DEPTH] += 1


def _leave(module: nn.Module, *call: Any) -> None:
    module.__dict__[_DEPTH] -= 1


def run(root: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` as if it were ``root.forward``: its own parameters gathered, backward hooked."""
    _enter(root)
    try:
        # In one piece: FSDP moves all tensors among arguments to its device, and makes their containers anew.
        return root.__dict__[_RUN](partial(function, *args, **kwargs))
    finally:
        _leave(root)


def begin_gradients(root: nn.Module) -> None:
    """Begin a step, in which no gradients were taken yet."""
    root.__dict__[_GRADIENTS] = set()


def note_gradients(root: nn.Module, unit: nn.Module) -> None:
    """Note that gradients are taken through ``unit`` of ``root``."""
    root.__dict__.setdefault(_GRADIENTS, set()).add(unit)


@contextmanager
def gathered_for_gradients(root: nn.Module) -> Generator[None, None, None]:
    """A backward pass. Graphs of gradients that were taken in the step's forward, as forces are, need parameters of
    units that no hook gathers for them: these stay gathered until it is over.
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


@torch.no_grad()
def gather_each(root: nn.Module) -> None:
    """Gather each unit's parameters and free them again, as a forward pass does. All ranks call it."""
    run(root, lambda: None)  # prepares all units, which only the root does
    for module in units_of(root):
        gather(module)
        module.reshard()


def gather_for_calls(root: nn.Module) -> None:
    """Gather the root's own parameters for each module's call: hooks call modules by themselves. Those in a graph of
    the user's ``torch.compile``, which hooks would break, are gathered for the module around it.
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
    """Run public methods ``names`` of modules under ``root``, such as ``generate``, under the nearest FSDP module's
    hooks. After one outside of a step all is resharded: the next reader would find the compute dtype's parameters.
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
        # Inside the owner's own forward its parameters are gathered already, and ending a second pass there would
        # free them under the first.
        if owner.__dict__.get(_DEPTH, 0) > 0:
            return method(*args, **kwargs)
        _prepare_outside_steps(root)
        try:
            return run(owner, method, *args, **kwargs)
        finally:
            _reshard_outside_steps(root)

    return redirected


def _is_outside_steps(root: nn.Module) -> bool:
    """Whether a module is called by a hook, and not by a step, nor again in its backward pass."""
    return root.__dict__.get(_DEPTH, 0) == 0 and not in_backward()


def _prepare_outside_steps(root: nn.Module) -> None:
    """Let FSDP prepare all units, which only the root does, ahead of a call of one of them by itself."""
    if not root.__dict__.get(_EXPECTS) and _is_outside_steps(root):
        run(root, lambda: None)


def _gather_for_call(root: Any, *, own: bool) -> None:
    """Gather the root's unit ahead of a module's call by a hook, and of one with its ``own`` parameters also in a step:
    a backward pass in manual optimization ends with them sharded.
    """
    if _is_outside_steps(root):
        _prepare_outside_steps(root)
        gather(root)
    elif own and not in_backward():
        gather(root)


def _reshard_outside_steps(root: nn.Module) -> None:
    if _is_outside_steps(root):
        # A graph that is still to be run backward gathers them again.
        Units(units_of(root)).reshard()
