"""The strategy names: presets of a class and a few constructor arguments, and their entry into Lightning's registry."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_shard.errors import ConfigurationError
from lightning_shard.text import did_you_mean

ALIGNED_SUFFIX = "_aligned"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A strategy name: ``class_path(**init_args)``."""

    name: str  # The value of ``Trainer(strategy=...)`` and of ``trainer.strategy`` in YAML.
    class_path: str  # Import path of the strategy class, as YAML has it.
    description: str  # One line for the table of names.
    # Constructor arguments as in YAML: strings, numbers, booleans, lists and mappings.
    init_args: Mapping[str, Any]

    @property
    def strategy_class(self) -> Any:
        """The class. Reading it imports the engine."""
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
    ("shard_deepspeed_stage_0", _DDP, {"accumulate_sync": "boundary", "find_unused_parameters": True},
     "as ZeRO's stage 0, on the DDP engine: everything replicated, accumulated gradients reduced once"),
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
"""Every registered name, in the order of the table."""


_STRATEGIES = "lightning.pytorch.strategies"
_OTHER_REGISTRIES = {
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        "pytorch_lightning's; import lightning_shard.pytorch_lightning ahead of it, or lightning.pytorch in its place",
    ),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "Fabric; use the Trainer, or Fabric's own strategies"),
}
"""Registries that can't use the names. There a name raises an error with the reason."""


def register() -> None:
    """Register factories for all names in Lightning's ``StrategyRegistry``. It may be repeated."""
    registry = importlib.import_module(_STRATEGIES).StrategyRegistry
    for preset in PRESETS.values():
        registry.register(preset.name, partial(build, preset.name), description=preset.description, override=True)
    for other, (name, where) in _OTHER_REGISTRIES.items():
        for preset in PRESETS.values() if other in sys.modules else ():
            refuse = partial(_refuse, preset.name, where)
            getattr(sys.modules[other], name).register(preset.name, refuse, description="", override=True)


def _refuse(name: str, where: str) -> None:
    raise ConfigurationError(f"{name} is a strategy of lightning.pytorch's Trainer, and this is {where}.")


def build(name: str, **more: Any) -> Any:
    """Build a strategy by its name, with ``more`` constructor arguments. ConfigurationError: no such name."""
    preset = find(name)
    return preset.strategy_class(**{**preset.init_args, **more})


def find(name: str) -> Preset:
    """The preset of this name. ConfigurationError: no such name. It lists all names and the nearest ones."""
    if name not in PRESETS:
        raise ConfigurationError(unknown_name(name))
    return PRESETS[name]


def unknown_name(name: str) -> str:
    """Message for a name that neither this package nor Lightning knows, with the nearest names and the list."""
    loaded = sys.modules.get(_STRATEGIES)
    lightning = [other for other in loaded.StrategyRegistry if other not in (*PRESETS, name)] if loaded else []
    return (
        f"there is no strategy {name!r}.{did_you_mean(name, [*PRESETS, *lightning])}\n"
        f"Strategies of lightning_shard: {', '.join(PRESETS)}. "
        "Lightning's own (auto, ddp, fsdp, ...) are allowed too."
    )
