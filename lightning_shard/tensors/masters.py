"""The master weights of parameters while an engine runs, for code that has only a part of the module, such as an
encoder that gets pretrained weights.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.names import named_parameters

_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter to its FQN and engine


def register_masters(module: nn.Module, engine: Any) -> Callable[[], None]:
    """Have `live_tensors` find the masters that ``engine`` (an `Engine`) keeps of ``module``. Returns the undo."""
    for fqn, parameter in named_parameters(module).items():
        _found[parameter] = fqn, engine

    def undo() -> None:
        for parameter in module.parameters():
            _found.pop(parameter, None)

    return undo


def live_tensors(tensors: Mapping[str, Tensor]) -> dict[str, LiveTensor]:
    """The master of each tensor, or the tensor itself if it has none, under the same name."""
    by_owner: dict[Any, Mapping[str, LiveTensor]] = {}
    found: dict[str, LiveTensor] = {}
    for name, tensor in tensors.items():
        fqn, owner = _found.get(tensor, ("", None))
        if owner is not None and owner not in by_owner:
            by_owner[owner] = owner.masters()
        found[name] = tensor if owner is None else by_owner[owner].get(fqn, tensor)
    return found


def refresh_model_weights(tensors: Iterable[Tensor]) -> None:
    """Update the model weights of ``tensors``' modules from their masters. All ranks call it with the same tensors."""
    for owner in dict.fromkeys(_found[tensor][1] for tensor in tensors if tensor in _found):
        owner.refresh_model_weights()
