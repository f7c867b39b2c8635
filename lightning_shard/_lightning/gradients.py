"""``lightning.pytorch.utilities.grad_norm`` on every engine: gradients may be sharded, or not in ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_shard._lightning.replaced import Replacements

_own = FunctionType(grad_norm.__code__, grad_norm.__globals__, argdefs=grad_norm.__defaults__)


def full_gradient_norms(
    replacements: Replacements, module: LightningModule, read: Callable[[str], Tensor | None]
) -> None:
    """Let ``grad_norm(module, norm_type)`` read gradients of ``module``, or of a part of it, through ``read``.

    The function itself answers, since users import it by name. It is a collective then.
    """
    replacements.replace(grad_norm, "shard_run", (module, read))
    replacements.replace(grad_norm, "__code__", _asks.__code__)


def _asks(module: nn.Module, norm_type: Any, group_separator: str = "/") -> Any:
    # It has the global names of Lightning's own.
    from lightning_shard._lightning.gradients import norms

    return norms(module, norm_type, group_separator)


def norms(module: nn.Module, norm_type: Any, group_separator: str) -> dict[str, float]:
    """What Lightning's function gives for full gradients."""
    whole, read = vars(grad_norm)["shard_run"]
    names = {id(parameter): fqn for fqn, parameter in whole.named_parameters()}
    gradients = [
        (name, SimpleNamespace(grad=read(names[id(p)]) if id(p) in names else p.grad))
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    found: dict[str, float] = _own(SimpleNamespace(named_parameters=lambda: gradients), norm_type, group_separator)
    return found
