"""What was made of parameters before an engine put others in their place, such as in ``__init__``: optimizers step the
new ones, and lists that modules keep of their parameters show them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.errors import ConfigurationError

_names: WeakKeyDictionary[nn.Module, WeakTensorKeyDictionary] = WeakKeyDictionary()
"""Module to the FQN of each parameter that it has had, as long as something else holds that."""


def remember(module: nn.Module) -> None:
    """Note the names of the module's parameters, before they are replaced."""
    names = _names.setdefault(module, WeakTensorKeyDictionary())
    for fqn, parameter in module.named_parameters():
        names[parameter] = fqn


def follow(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Let optimizers step, in the same groups, what took the place of the parameters that they were made with.
    ConfigurationError: one steps what the module never had, or has stepped already what was replaced.
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
                "not have, so that nothing would train it with the others. Make it an attribute of the module, and the "
                "optimizer in configure_optimizers from self.parameters()."
            )
        if optimizer.state.get(parameter):
            raise ConfigurationError(
                f"optimizer {index} ({name}) has stepped {fqn} before the module was sharded, and its state can't be "
                "taken over. Make it in configure_optimizers, or load the state from a checkpoint with ckpt_path."
            )
        return live[fqn]

    replaced = [
        (group, [current(index, optimizer, p) for p in group["params"]])
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
    ]
    for group, parameters in replaced:
        # In place: some optimizers (LBFGS) hold the list elsewhere too.
        group["params"][:] = parameters


def follow_in_lists(module: nn.Module) -> None:
    """Let the lists, tuples and dicts that modules keep of replaced parameters show what took their place: at each look
    what the parameter's own module has then, in its forward the gathered parameter.
    """
    names = _names.get(module, WeakTensorKeyDictionary())
    live = dict(module.named_parameters(remove_duplicate=False))
    inside: set[int] = set()  # the containers that are being looked into: one may hold itself

    def look(value: Any) -> Callable[[], Any] | None:
        """What to call for an item in the place of ``value``; None: it is no replaced parameter and holds none."""
        if isinstance(value, nn.Parameter):
            fqn = names.get(value)
            if fqn is None or fqn not in live or live[fqn] is value:
                return None
            owner, _, name = fqn.rpartition(".")
            return lambda: getattr(module.get_submodule(owner), name)
        if type(value) not in (list, tuple, dict) or id(value) in inside:
            return None
        inside.add(id(value))
        items: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
        looks = {key: found for key, item in items.items() if (found := look(item)) is not None}
        inside.remove(id(value))
        if not looks:
            return None
        reads = {key: looks.get(key) or partial(lambda same: same, item) for key, item in items.items()}
        shown = LiveDict(reads) if isinstance(value, dict) else LiveList(list(reads.values()))
        return lambda: shown

    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not isinstance(value, nn.Parameter) and (read := look(value)) is not None:
                vars(part)[name] = read()


class LiveList(Sequence[Any]):
    """Parameters, and what else was in a list or tuple, as they are at each look."""

    def __init__(self, reads: Sequence[Callable[[], Any]]) -> None:
        self._reads = reads

    def __len__(self) -> int:
        return len(self._reads)

    def __getitem__(self, index: Any) -> Any:
        return [read() for read in self._reads[index]] if isinstance(index, slice) else self._reads[index]()

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]


class LiveDict(Mapping[Any, Any]):
    """The same of a dict."""

    def __init__(self, reads: Mapping[Any, Callable[[], Any]]) -> None:
        self._reads = reads

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._reads)

    def __getitem__(self, key: Any) -> Any:
        return self._reads[key]()
