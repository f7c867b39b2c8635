"""Activation checkpointing and compilation of a module's forward.

Both replace ``module.forward`` on the instance, so that no FQN gains a prefix and hooks stay outside. "selective" is
torch's selective activation checkpointing. It saves the results of operators that torch's FLOP counter knows (products,
convolutions, attention) and recomputes the cheap rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import CodeType, FunctionType
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from lightning_shard.engines.activation_offload import SAVED_OBSERVERS, HostInputs
from lightning_shard.engines.units import Unit, of_classes
from lightning_shard.errors import WrappingError
from lightning_shard.precision.casting import inside_modules, replace_forward
from lightning_shard.tensors.tracing import TorchDispatchMode, schema_of

Checkpointing = Literal["units", "selective", "offload"] | int | list[str] | None

SELECTIVE: Final = "selective"
OFFLOAD: Final = "offload"


def checkpointed_modules(root: nn.Module, units: list[Unit], spec: Checkpointing) -> list[nn.Module]:
    """The modules whose forward is recomputed in backward. WrappingError: there is none."""
    if spec is None:
        return []
    if isinstance(spec, list):
        return of_classes(root, spec, "activation_checkpointing")
    modules = [unit.module for unit in units if not unit.standalone]
    _refuse_without_units(modules, "activation_checkpointing")
    return modules[::spec] if isinstance(spec, int) else modules


def _refuse_without_units(modules: list[nn.Module], option: str) -> None:
    if not modules:
        raise WrappingError(
            f"{option} goes by shard units, but the model has none below its root. Set units if the strategy has them, "
            "name classes to checkpoint, or call torch.compile in configure_model."
        )


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Options of the units' forward, on every engine."""

    activation_checkpointing: Checkpointing = None  # See the strategies.
    compile: bool = False  # Whether each unit's forward is compiled.

    def __post_init__(self) -> None:
        if isinstance(every := self.activation_checkpointing, int) and every < 1:
            raise WrappingError(f"activation_checkpointing is {every}, but n for every n-th unit must be 1 or more.")
        if self.activation_checkpointing == OFFLOAD and self.compile:
            raise WrappingError(
                "activation_checkpointing is 'offload' and compile is true, but a compiled unit saves all tensors of "
                "its graph, not only its inputs. Set activation_checkpointing: units, or compile: false."
            )

    @property
    def recomputes(self) -> bool:
        return self.activation_checkpointing is not None


def find_transforms(
    root: nn.Module, units: list[Unit], options: ForwardOptions
) -> Callable[[], list[Callable[[], None]]]:
    """Find the modules that ``options`` change (WrappingError: there is none). The returned function changes them and
    returns the undo of each, in order.
    """
    spec = options.activation_checkpointing
    checkpointed = checkpointed_modules(root, units, spec)
    compiled = [unit.module for unit in units if not unit.standalone] if options.compile else []
    if options.compile:
        _refuse_without_units(compiled, "compile")
    inputs = HostInputs()
    # Compilation outside, so that the compiler sees the recomputation.
    return lambda: [
        *(checkpoint_forward(m, spec, inputs) for m in checkpointed),
        *(compile_forward(m) for m in compiled),
    ]


def compile_forward(module: nn.Module) -> Callable[[], None]:
    """Compile the module's forward. Modules of one class share a graph."""
    return replace_forward(module, torch.compile(_of_its_class(type(module), module.forward)))


def _of_its_class(kind: type[nn.Module], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a code object per class, because Dynamo keeps at most eight graphs per code object."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    if kind not in _CODES:
        name = f"forward of {kind.__module__}.{kind.__qualname__}"
        _CODES[kind] = forward.__code__.replace(co_name=name)
    own = FunctionType(_CODES[kind], forward.__globals__, closure=forward.__closure__)
    # With its signature.
    return update_wrapper(own, function, assigned=(), updated=())


_CODES: WeakKeyDictionary[type[nn.Module], CodeType] = WeakKeyDictionary()


def checkpoint_forward(module: nn.Module, spec: Checkpointing, inputs: HostInputs | None = None) -> Callable[[], None]:
    """Recompute the module's forward in backward. ``inputs``: the model's offloaded inputs."""
    # Non-reentrant: keyword arguments, nested checkpoints and inputs without gradients all work.
    run = partial(checkpoint, inside_modules(module.forward), use_reentrant=False)
    forms: dict[str, Callable[..., Any]] = {
        SELECTIVE: partial(_selectively, run),
        OFFLOAD: (inputs or HostInputs()).wrap(run),
    }
    return replace_forward(module, forms.get(spec, run) if isinstance(spec, str) else run)


def _selectively(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # torch.compile needs torch's own contexts to mark the operators of its graph.
    return run(*args, context_fn=_torchs if torch.compiler.is_compiling() else selective_contexts, **kwargs)


def selective_contexts() -> tuple[Any, Any]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: contexts of forward and of the recomputation."""
    forward, again = _torchs()
    return _Expensive(forward, SAVED_OBSERVERS), _Expensive(again, [])


def is_kept(operator: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether the results of this call of an operator are saved for backward."""
    schema = schema_of(operator)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "dropout_p" not in names:
        return getattr(operator, "overloadpacket", operator) in flop_registry
    # Attention, some of it unknown to torch's counter. With dropout it is recomputed, because a skipped kernel would
    # not advance the random numbers for later operators.
    return dict(zip(names, args, strict=False), **(kwargs or {})).get("dropout_p", 0) == 0


def _saved_or_not(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


_torchs = partial(create_selective_checkpoint_contexts, _saved_or_not)


class _Expensive(TorchDispatchMode):
    """Passes only saved operators to torch's mode, which requires the same operators in the recomputation. Engines'
    hooks run others there, because gathered parameters are not gathered again. Compiled code inside stays compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, mode: TorchDispatchMode, observers: list[Callable[[Any], None]]) -> None:
        super().__init__()
        self._mode = mode
        self._observers = observers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_kept(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        result = self._mode.__torch_dispatch__(func, types, args, kwargs)
        for observe in self._observers:
            observe(result)
        return result
