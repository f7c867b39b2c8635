"""Running methods other than ``forward`` with FSDP's hooks around them."""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lightning_shard.engines import _fsdp2
from lightning_shard.engines._dtensors import InFull
from lightning_shard.engines._fsdp2 import expect_gradients, gather, leave_out_nested, may_stay, stay, units_of
from lightning_shard.precision.casting import in_backward
from lightning_shard.private_names import require

require(nn.Module, "_parameters")

_RUN = "_shard_run"
_DEPTH = "_shard_forward_depth"
_INSIDE = "_shard_steps"  # How many calls of `run` are past FSDP's own preparations.
_EXPECTS = "_shard_expects_gradients"
_CALLS = "_shard_calls"  # How many forward passes of modules with parameters below the root are running.


def install_runner(root: nn.Module) -> None:
    """Let `run` work on ``root``, an FSDP module."""
    if _RUN in root.__dict__:
        return
    root.__dict__[_RUN] = partial(_run_inside, root)
    register_fsdp_forward_method(root, _RUN)
    root.__dict__[_DEPTH] = root.__dict__[_INSIDE] = root.__dict__[_CALLS] = 0
    root.register_forward_pre_hook(lambda module, args: _count(module, 1), prepend=True)
    root.register_forward_hook(lambda module, args, output: _count(module, -1), always_call=True)
    assert isinstance(root, FSDPModule)
    leave_out_nested(root, lambda: root.__dict__[_DEPTH] > 1)


def _run_inside(root: nn.Module, function: Callable[[], Any]) -> Any:
    if not root.__dict__.get(_EXPECTS):
        # After FSDP's lazy initialisation, which would undo it.
        expect_gradients(root)
        root.__dict__[_EXPECTS] = True
    root.__dict__[_INSIDE] += 1
    try:
        return function()
    finally:
        root.__dict__[_INSIDE] -= 1


def _count(module: nn.Module, step: int) -> None:
    module.__dict__[_DEPTH] += step


def run(root: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` as if it were ``root.forward``: its own parameters gathered, backward hooked."""
    _count(root, 1)
    try:
        # In one piece: FSDP moves all tensors among arguments to its device, and makes their containers anew.
        return root.__dict__[_RUN](partial(function, *args, **kwargs))
    finally:
        _count(root, -1)


@torch.no_grad()
def gather_each(root: nn.Module) -> None:
    """Gather each unit's parameters and free them again, as a forward pass does. All ranks call it."""
    run(root, lambda: None)  # prepares all units, which only the root does
    for module in units_of(root):
        gather(module)
        module.reshard()


class _GatheredOnRead(dict[str, "nn.Parameter | None"]):
    """The parameters of a module whose unit is the root, gathered when one is read inside a step: a backward pass
    inside (manual optimization, a gradient penalty) ends with them sharded, while the step may go on to use them. And
    those of an embedding or a head in a ``unit`` of its own, which a step may use outside of its forward.
    """

    def __init__(self, module: nn.Module, root: FSDPModule, unit: FSDPModule | None = None) -> None:
        super().__init__(module._parameters)
        module._parameters = self
        self._root, self._unit = root, unit
        self._trained = {name: p for name, p in self.items() if p is not None and isinstance(p, DTensor)}

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        known = self._trained.get(name)
        # hpZ's shard between forward and backward, over fewer ranks, is FSDP's to free.
        if isinstance(value, DTensor) and (known is None or known.device_mesh == value.device_mesh):
            self._trained[name] = value
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        value = super().__getitem__(name)
        if value is None or name not in self._trained or vars(self._root).get(_INSIDE, 0) == 0:
            return value
        if InFull.in_a_hook() and not vars(self._root)[_CALLS]:
            return value  # After a backward pass in the step it is the shard, which has the gradient.
        if self._unit is not None and not vars(self._unit)[_DEPTH]:
            stay(self._unit)
        elif isinstance(value, DTensor):
            gather(self._root)
        value = super().__getitem__(name)
        assert value is not None
        # `toggle_optimizer` sees the sharded parameter alone, and the gathered one was made before. torch.func's
        # transforms refuse even a call that changes nothing.
        if value.requires_grad != (trained := self._trained[name].requires_grad):
            value.requires_grad_(trained)
        return value


def gather_on_read(root: nn.Module, apart: Iterable[nn.Module]) -> None:
    """Let a step use parameters of the root's own unit, and of the units ``apart``, at any time, and a hook call any
    module by itself.
    """
    assert isinstance(root, FSDPModule)
    for unit in apart:
        assert isinstance(unit, FSDPModule)
        _GatheredOnRead(unit, root, unit)
        may_stay(unit)

    def visit(module: nn.Module) -> None:
        below = isinstance(module, FSDPModule) and module is not root
        own = any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        if own and not below:
            _GatheredOnRead(module, root)
        if module is not root and (own or below):
            module.register_forward_pre_hook(lambda *_: _gather_outside_steps(root), prepend=True)
            module.register_forward_hook(lambda *_: _end_of_call(root), always_call=True)
        for child in () if below else module.children():
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


def _gather_outside_steps(root: Any) -> None:
    root.__dict__[_CALLS] += 1
    if _is_outside_steps(root):
        _prepare_outside_steps(root)
        gather(root)


def _end_of_call(root: nn.Module) -> None:
    root.__dict__[_CALLS] -= 1
    _reshard_outside_steps(root)


def _reshard_outside_steps(root: nn.Module) -> None:
    if _is_outside_steps(root):
        # A graph that is still to be run backward gathers them again.
        reshard(root)


def reshard(root: nn.Module) -> None:
    """Reshard every unit, without communication: an evaluation forward leaves the root's parameters gathered."""
    for module in units_of(root):
        _fsdp2.reshard(module)
