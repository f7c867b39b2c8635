"""The strategy names: one table of presets, and its way into Lightning's registry.

A name is a class and a few of its constructor arguments, nothing more; ``lightning-shard strategies NAME`` prints the
equal YAML.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.errors import ConfigurationError
from lightning_shard.text import did_you_mean

ALIGNED_SUFFIX = "_aligned"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A strategy name: ``class_path(**init_args)``."""

    name: str
    """What goes into ``Trainer(strategy=...)`` and ``trainer.strategy`` in YAML."""

    class_path: str
    """Import path of the strategy class, as YAML has it."""

    description: str
    """One line for the table of names."""

    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments in the form that YAML has them: strings, numbers, booleans, lists and mappings."""


def _with_aligned(presets: Iterable[Preset]) -> dict[str, Preset]:
    """The presets by name, each followed by its ``_aligned`` form."""
    table = {}
    for preset in presets:
        aligned = Preset(
            name=preset.name + ALIGNED_SUFFIX,
            class_path=preset.class_path,
            description=f"{preset.name} under the aligned precision contract",
            init_args={**preset.init_args, "aligned": True},
        )
        table[preset.name] = preset
        table[aligned.name] = aligned
    return table


_DDP = "lightning_shard.ShardDDPStrategy"
_FSDP = "lightning_shard.ShardFSDPStrategy"
_DEEPSPEED = "lightning_shard.ShardDeepSpeedStrategy"
_CPU = {"device": "cpu"}
_NVME = {"device": "nvme", "nvme_path": "nvme_offload"}

PRESETS: Mapping[str, Preset] = _with_aligned(
    [
        Preset(
            name="shard_ddp",
            class_path=_DDP,
            description="DDP: every process holds everything, gradients are averaged",
        ),
        Preset(
            name="shard_fsdp",
            class_path=_FSDP,
            description="FSDP2 full shard: parameters, gradients and optimizer state are cut (as ZeRO-3)",
        ),
        Preset(
            name="shard_fsdp_grad_op",
            class_path=_FSDP,
            description="FSDP2 with parameters kept gathered after forward: less traffic, more memory (as ZeRO-2)",
            init_args={"reshard_after_forward": False},
        ),
        Preset(
            name="shard_fsdp_hybrid",
            class_path=_FSDP,
            description="FSDP2 shard inside a node, replicate across nodes",
            init_args={"mesh": {"replicate": "auto", "shard": "auto"}},
        ),
        Preset(
            name="shard_fsdp_offload",
            class_path=_FSDP,
            description="FSDP2 full shard with parameters, gradients and optimizer state in host memory",
            init_args={"cpu_offload": True},
        ),
        Preset(
            name="shard_deepspeed_stage_0",
            class_path=_DEEPSPEED,
            description="DeepSpeed without ZeRO: every process holds everything (as shard_ddp)",
            init_args={"stage": 0},
        ),
        Preset(
            name="shard_deepspeed_stage_1",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-1: optimizer state and masters are cut",
            init_args={"stage": 1},
        ),
        Preset(
            name="shard_deepspeed_stage_2",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-2: gradients are cut too",
            init_args={"stage": 2},
        ),
        Preset(
            name="shard_deepspeed_stage_2_offload",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-2 with optimizer state and masters in host memory",
            init_args={"stage": 2, "offload_optimizer": _CPU},
        ),
        Preset(
            name="shard_deepspeed_stage_3",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-3: parameters are cut too",
            init_args={"stage": 3},
        ),
        Preset(
            name="shard_deepspeed_stage_3_offload",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-3 with parameters, optimizer state and masters in host memory",
            init_args={"stage": 3, "offload_optimizer": _CPU, "offload_parameters": _CPU},
        ),
        Preset(
            name="shard_deepspeed_stage_3_offload_nvme",
            class_path=_DEEPSPEED,
            description="DeepSpeed ZeRO-3 with parameters, optimizer state and masters in files, in ./nvme_offload",
            init_args={"stage": 3, "offload_optimizer": _NVME, "offload_parameters": _NVME},
        ),
    ]
)
"""Every name that :func:`register` registers, in the order of the table."""


def register() -> None:
    """Put every name into Lightning's ``StrategyRegistry``; calling it again changes nothing.

    What is registered is a factory, so that the strategy classes and their engines are imported when one is built.
    """
    for preset in PRESETS.values():
        StrategyRegistry.register(
            preset.name, partial(build, preset.name), description=preset.description, override=True
        )


def build(name: str, **more: Any) -> Any:
    """A new strategy of this name.

    Args:
        name: a registered one.
        **more: constructor arguments beside those that the name stands for.

    Raises:
        ConfigurationError: there is no such name.
    """
    preset = find(name)
    module, _, attribute = preset.class_path.rpartition(".")
    strategy_class = getattr(importlib.import_module(module), attribute)
    arguments = {key: _built(key, value) for key, value in preset.init_args.items()}
    return strategy_class(**arguments, **more)


def _built(argument: str, value: Any) -> Any:
    """An argument as the constructor takes it, from the form that YAML has it in."""
    if argument == "mesh":
        from lightning_shard.mesh import MeshConfig

        return MeshConfig(**value)
    if argument in ("offload_optimizer", "offload_parameters"):
        from lightning_shard.engines.zero import config as deepspeed_config

        group = "OptimizerOffload" if argument == "offload_optimizer" else "ParameterOffload"
        return getattr(deepspeed_config, group)(**value)
    return value


def find(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigurationError: there is no such name; the message has the nearest ones and the list.
    """
    if name not in PRESETS:
        raise ConfigurationError(unknown_name(name))
    return PRESETS[name]


def unknown_name(name: str) -> str:
    """Message for a name that neither this package nor Lightning knows: the nearest ones and the list."""
    lightning = [other for other in StrategyRegistry if other not in PRESETS]
    return (
        f"there is no strategy {name!r}.{did_you_mean(name, [*PRESETS, *lightning])}\n"
        f"Strategies of lightning_shard: {', '.join(PRESETS)}. "
        "Lightning's own (auto, ddp, fsdp, ...) are allowed too."
    )
