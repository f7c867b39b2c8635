"""What an engine holds in the place of a module's parameters, found from the parameters themselves.

Who has nothing but a part of a module (pretrained weights for an encoder) fills what the optimizer steps, and then lets
the module see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.checkpoint.flat_shard import FlatTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StandIns:
    """Of one module, as long as its engine runs."""

    tensors: Callable[[], Mapping[str, Tensor | FlatTensor]]
    """FQN to live tensor, of the parameters that have a stand-in."""

    show: Callable[[], None]
    """Let the module see values that were written into them. All ranks call it."""


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter to its FQN and stand-ins


def install(module: nn.Module, stand_ins: StandIns) -> None:
    """Have the parameters of ``module`` found in ``stand_ins``, until `remove`."""
    for fqn, parameter in module.named_parameters():
        _found[parameter] = fqn, stand_ins


def remove(module: nn.Module) -> None:
    """Forget the stand-ins of a module's parameters."""
    for parameter in module.parameters():
        _found.pop(parameter, None)


def in_place_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | FlatTensor]:
    """Each tensor, or what stands for it, under the same name."""
    by_owner: dict[StandIns, Mapping[str, Tensor | FlatTensor]] = {}
    found: dict[str, Tensor | FlatTensor] = {}
    for name, tensor in tensors.items():
        fqn, owner = _found.get(tensor, ("", None))
        if owner is not None and owner not in by_owner:
            by_owner[owner] = owner.tensors()
        found[name] = tensor if owner is None else by_owner[owner].get(fqn, tensor)
    return found


def show(tensors: Iterable[Tensor]) -> None:
    """Let the modules of ``tensors`` see what was written in their place. All ranks call it with the same ones."""
    for owner in dict.fromkeys(_found[tensor][1] for tensor in tensors if tensor in _found):
        owner.show()
