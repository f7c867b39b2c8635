"""Running methods other than ``forward`` with FSDP's hooks around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

_RUN = "_shard_run"
_DEPTH = "_shard_forward_depth"


def install_runner(root: nn.Module) -> Callable[[], None]:
    """Let `run` work on ``root``; returns a function that takes it back. No-op on a module without FSDP."""
    if not isinstance(root, FSDPModule) or _RUN in root.__dict__:
        return lambda: None
    root.__dict__[_RUN] = lambda function, *args, **kwargs: function(*args, **kwargs)
    register_fsdp_forward_method(root, _RUN)
    root.__dict__[_DEPTH] = 0
    handles = [
        root.register_forward_pre_hook(lambda module, args: _enter(module), prepend=True),
        root.register_forward_hook(lambda module, args, output: _leave(module), always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        root.__dict__.pop(_RUN, None)
        root.__dict__.pop(_DEPTH, None)

    return remove


def _enter(module: nn.Module) -> None:
    module.__dict__[_DEPTH] += 1


def _leave(module: nn.Module) -> None:
    module.__dict__[_DEPTH] -= 1


def run(root: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` as if it were ``root.forward``: its own parameters gathered, backward hooked."""
    runner = root.__dict__.get(_RUN)
    if runner is None:
        return function(*args, **kwargs)
    _enter(root)
    try:
        return runner(function, *args, **kwargs)
    finally:
        _leave(root)


def hook_loss(root: nn.Module, loss: Tensor) -> None:
    """Tell FSDP that ``loss`` is an output of ``root``.

    Backward from inside a step (manual optimization) starts before the step's output was seen; without this, a
    root that has no units below it would never reduce its gradients.
    """
    run(root, lambda value: value, loss)


def patch_methods(root: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Make methods such as ``generate`` run under the hooks of the nearest enclosing FSDP module.

    Every module under ``root`` that has a public method of one of ``names`` gets it patched on the instance.
    Returns a function that takes it back.
    """
    names = list(names)
    undo: list[Callable[[], None]] = []

    def visit(module: nn.Module, owner: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            owner = module
            undo.append(install_runner(module))
        for name in names:
            method = getattr(module, name, None)
            if callable(method) and not isinstance(method, nn.Module) and name not in module.__dict__:
                object.__setattr__(module, name, _redirect(owner, method))
                undo.append(partial(module.__dict__.pop, name, None))
        for child in module.children():
            visit(child, owner)

    visit(root, root)

    def remove() -> None:
        for step in undo:
            step()

    return remove


def _redirect(owner: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        # Inside the owner's own forward its parameters are gathered already, and ending a second pass there would
        # free them under the first.
        if owner.__dict__.get(_DEPTH, 0) > 0:
            return method(*args, **kwargs)
        return run(owner, method, *args, **kwargs)

    return redirected
