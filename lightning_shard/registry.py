"""The strategy names: one table of presets, each a class and a few of its constructor arguments, and its way into
Lightning's registry; and the way of this package's checkpoints into Lightning's ``load_from_checkpoint``.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.text import did_you_mean

ALIGNED_SUFFIX = "_aligned"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A strategy name: ``class_path(**init_args)``."""

    name: str  # What goes into ``Trainer(strategy=...)`` and ``trainer.strategy`` in YAML.
    class_path: str  # Import path of the strategy class, as YAML has it.
    description: str  # One line for the table of names.
    # Constructor arguments in the form that YAML has them: strings, numbers, booleans, lists and mappings.
    init_args: Mapping[str, Any]

    @property
    def strategy_class(self) -> Any:
        """The class, which is imported with its engine."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)


_DDP = "lightning_shard.ShardDDPStrategy"
_FSDP = "lightning_shard.ShardFSDPStrategy"
_ZERO = "lightning_shard.ShardDeepSpeedStrategy"
_CPU = {"device": "cpu"}
_NVME = {"device": "nvme", "nvme_path": "nvme_offload"}

_TABLE: list[tuple[str, str, dict[str, Any], str]] = [
    ("shard_ddp", _DDP, {}, "DDP: model and optimizer state replicated, gradients averaged"),
    ("shard_fsdp", _FSDP, {}, "FSDP2 full shard: parameters, gradients and optimizer state are sharded (as ZeRO-3)"),
    ("shard_fsdp_grad_op", _FSDP, {"reshard_after_forward": False},
     "FSDP2 with parameters kept gathered after forward: less traffic, more memory (as ZeRO-2)"),
    ("shard_fsdp_hybrid", _FSDP, {"mesh": {"replicate": "auto", "shard": "auto"}},
     "FSDP2 shard inside a node, replicate across nodes"),
    ("shard_fsdp_offload", _FSDP, {"cpu_offload": True},
     "FSDP2 full shard with parameters, gradients and optimizer state in host memory"),
    ("shard_deepspeed_stage_0", _ZERO, {"stage": 0}, "DeepSpeed without ZeRO: everything replicated (as shard_ddp)"),
    ("shard_deepspeed_stage_1", _ZERO, {"stage": 1},
     "DeepSpeed ZeRO-1: optimizer state and master weights are sharded"),
    ("shard_deepspeed_stage_2", _ZERO, {"stage": 2}, "DeepSpeed ZeRO-2: gradients are sharded too"),
    ("shard_deepspeed_stage_2_offload", _ZERO, {"stage": 2, "offload_optimizer": _CPU},
     "DeepSpeed ZeRO-2 with optimizer state and master weights in host memory"),
    ("shard_deepspeed_stage_3", _ZERO, {"stage": 3}, "DeepSpeed ZeRO-3: parameters are sharded too"),
    ("shard_deepspeed_stage_3_offload", _ZERO, {"stage": 3, "offload_optimizer": _CPU, "offload_parameters": _CPU},
     "DeepSpeed ZeRO-3 with parameters, optimizer state and master weights in host memory"),
    ("shard_deepspeed_stage_3_offload_nvme", _ZERO,
     {"stage": 3, "offload_optimizer": _NVME, "offload_parameters": _NVME},
     "DeepSpeed ZeRO-3 with parameters, optimizer state and master weights in files, in ./nvme_offload"),
]  # fmt: skip


def _presets() -> Iterator[Preset]:
    """Each row of the table, followed by its ``_aligned`` form."""
    for name, path, arguments, text in _TABLE:
        yield Preset(name=name, class_path=path, init_args=arguments, description=text)
        aligned, text = {**arguments, "aligned": True}, f"{name} under the aligned precision contract"
        yield Preset(name=name + ALIGNED_SUFFIX, class_path=path, init_args=aligned, description=text)


PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _presets()}
"""Every name that :func:`register` registers, in the order of the table."""


_STRATEGIES = "lightning.pytorch.strategies"
_OTHERS = {
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        "pytorch_lightning's; import lightning.pytorch in its place, also where the LightningModule is",
    ),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "Fabric; use the Trainer, or Fabric's own strategies"),
}
"""Modules with registries in which a name says why it is of no use there."""
_READERS = {
    "lightning.pytorch.core.module": ("LightningModule", "load_from_checkpoint"),
    "lightning.pytorch.core.datamodule": ("LightningDataModule", "load_from_checkpoint"),
    "lightning.fabric.plugins.io.torch_io": ("TorchCheckpointIO", "load_checkpoint"),
}
"""Modules with classes and what of them reads a checkpoint, which they take for one file."""


def register() -> None:
    """Put factories for all names into Lightning's ``StrategyRegistry``, once it is imported, and `_Reader` into its
    classes; may be repeated.
    """
    waiting = set()
    for module in (_STRATEGIES, *_OTHERS, *_READERS):
        if module in sys.modules:
            _register_in(sys.modules[module])
        else:
            waiting.add(module)
    if waiting and not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport(waiting))


class _RegisterOnImport(MetaPathFinder):
    """Waits for the first import of Lightning's strategies, which takes seconds that a command may not need."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        self._waiting.remove(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_in(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_in(module: ModuleType) -> None:
    if module.__name__ in _OTHERS:
        registry, where = _OTHERS[module.__name__]
        for name in PRESETS:
            getattr(module, registry).register(name, partial(_refuse, name, where), description="", override=True)
        return
    if module.__name__ in _READERS:
        name, method = _READERS[module.__name__]
        owner = getattr(module, name)
        if not isinstance(stock := vars(owner)[method], _Reader):
            setattr(owner, method, _Reader(stock))
        return
    strategies: Any = module.StrategyRegistry
    for preset in PRESETS.values():
        strategies.register(preset.name, partial(build, preset.name), description=preset.description, override=True)
    strategies.available_strategies = partial(_available, strategies)


def _refuse(name: str, where: str) -> None:
    raise ConfigurationError(f"{name} is a strategy of lightning.pytorch's Trainer, and this is {where}.")


class _Reader:
    """A method of Lightning's that reads a checkpoint, and knows a directory of this package."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        stock = self._stock.__get__(instance, owner)

        @wraps(stock)
        def read(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(("path", "map_location", "hparams_file", "strict", "weights_only"), args, strict=False))
            path = given.pop("path", kwargs.get("checkpoint_path", kwargs.get("path")))
            if not _is_directory(path) or (instance is not None and hasattr(owner, "forward")):
                return stock(*args, **kwargs)
            if not hasattr(owner, "forward"):
                raise CheckpointError(
                    f"{path} is a directory, and stock strategies and data modules read one file. Write it with "
                    f"`lightning-shard checkpoint convert {path} FILE`, or run with a strategy of this package."
                )
            given |= {name: value for name, value in kwargs.items() if name != "checkpoint_path"}
            given.pop("weights_only", None)  # no code of it is run in any case
            location = given.pop("map_location", None)
            ours = importlib.import_module("lightning_shard.run.full_tensors").load_from_checkpoint
            module = ours(owner, path, **given)
            return (
                module if location is None or callable(location) or isinstance(location, dict) else module.to(location)
            )

        return read


def _is_directory(path: Any) -> bool:
    """Whether Lightning, which reads one file, can't read what is at ``path``."""
    if not isinstance(path, str | os.PathLike) or str(path).startswith("http"):
        return False
    if "://" not in str(path):
        return os.path.isdir(path)
    from lightning_shard.checkpoint.files import layout, location

    return (location.location(path) / layout.MANIFEST).is_file()


def _available(strategies: Any) -> list[str]:
    """Lightning's list of names; to the Trainer it explains a name that is not there."""
    names: list[str] = type(strategies).available_strategies(strategies)
    frame = inspect.currentframe()
    frame = frame and frame.f_back  # Its own frame in a variable would be a cycle, which keeps the Trainer.
    if frame is None or frame.f_globals["__name__"] != "lightning.pytorch.trainer.connectors.accelerator_connector":
        return names
    return _Names(names)


class _Names(list[str]):
    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if isinstance(name, str) and not found:
            raise ConfigurationError(unknown_name(name))
        return found


def build(name: str, **more: Any) -> Any:
    """A new strategy of this name, with ``more`` constructor arguments; ConfigurationError: there is no such name."""
    preset = find(name)
    return preset.strategy_class(**{**preset.init_args, **more})


def find(name: str) -> Preset:
    """The preset of this name; ConfigurationError: there is none, with the nearest names and the list."""
    if name not in PRESETS:
        raise ConfigurationError(unknown_name(name))
    return PRESETS[name]


def unknown_name(name: str) -> str:
    """Message for a name that neither this package nor Lightning knows: the nearest ones and the list."""
    loaded = sys.modules.get(_STRATEGIES)
    lightning = [other for other in loaded.StrategyRegistry if other not in (*PRESETS, name)] if loaded else []
    return (
        f"there is no strategy {name!r}.{did_you_mean(name, [*PRESETS, *lightning])}\n"
        f"Strategies of lightning_shard: {', '.join(PRESETS)}. "
        "Lightning's own (auto, ddp, fsdp, ...) are allowed too."
    )
