"""Remap optimizers that were built on unsharded parameters, such as in ``__init__``, to the sharded ones."""

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.errors import ConfigurationError

_names: WeakKeyDictionary[nn.Module, WeakTensorKeyDictionary] = WeakKeyDictionary()
"""By module, the FQN of each parameter that it has or had and that is still alive."""


def remember_parameters(module: nn.Module) -> None:
    """Record the names of the module's parameters before they are replaced."""
    names = _names.setdefault(module, WeakTensorKeyDictionary())
    for fqn, parameter in module.named_parameters():
        names[parameter] = fqn


def names_of(module: nn.Module) -> Mapping[Tensor, str]:
    """FQNs by tensor, of the module's present and recorded parameters."""
    return {**_names.get(module, {}), **{parameter: fqn for fqn, parameter in module.named_parameters()}}


def remap_optimizers(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Replace recorded parameters in the optimizers' groups by the module's present ones. ConfigurationError: an
    optimizer has a parameter that the module never had, or state of a replaced one.
    """
    names = _names.get(module, WeakTensorKeyDictionary())
    live = dict(module.named_parameters(remove_duplicate=False))
    present = set(live.values())

    def current(index: int, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        if parameter in present:
            return parameter
        name = type(optimizer).__qualname__
        if (fqn := names.get(parameter)) is None:
            raise ConfigurationError(
                f"optimizer {index} ({name}) steps a parameter of shape {tuple(parameter.shape)} that the module does "
                "not have, so it would not be trained with the others. Make it an attribute of the module, and the "
                "optimizer in configure_optimizers from self.parameters()."
            )
        if optimizer.state.get(parameter):
            raise ConfigurationError(
                f"optimizer {index} ({name}) has stepped {fqn} before the module was sharded, and its state can't be "
                "sharded. Make it in configure_optimizers, or load the state from a checkpoint with ckpt_path."
            )
        return live[fqn]

    replaced = [
        (group, [current(index, optimizer, p) for p in group["params"]])
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
    ]
    for group, parameters in replaced:
        # In place: some optimizers (LBFGS) refer to the list elsewhere too.
        group["params"][:] = parameters
