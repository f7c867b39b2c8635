"""Sharded training strategies for PyTorch Lightning.

Importing this package imports Lightning and registers the strategy names there, so that
``Trainer(strategy="shard_fsdp_aligned")`` and ``trainer.strategy: shard_fsdp_aligned`` in YAML work.
``lightning-shard strategies`` lists them. Everything else in ``__all__`` is imported on first use, as are
``lightning_shard.callbacks`` and ``lightning_shard.tools``, the commands as functions.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_shard.errors import *
from lightning_shard.registry import register
from lightning_shard.text import did_you_mean

if TYPE_CHECKING:
    from lightning_shard.callbacks.ema import EMACallback
    from lightning_shard.checkpoint.foreign.pretrained_weights import load_pretrained
    from lightning_shard.cluster.preemption import PreemptionConfig
    from lightning_shard.commands.cli import ShardCLI
    from lightning_shard.engines.units import UnitRule
    from lightning_shard.engines.zero.config.fields import (
        OptimizerOffload,
        ParameterOffload,
        Stage3Options,
        ZeroBuckets,
        ZeroPlusPlus,
    )
    from lightning_shard.mesh import MeshConfig
    from lightning_shard.precision.float8 import Float8
    from lightning_shard.precision.loss_scale import LossScaling
    from lightning_shard.precision.policy import PrecisionPolicy
    from lightning_shard.run.full_tensors import (
        full_parameters,
        full_tensor,
        load_from_checkpoint,
        set_full_tensor,
        unshard,
    )
    from lightning_shard.strategies.ddp import ShardDDPStrategy
    from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
    from lightning_shard.strategies.fsdp import ShardFSDPStrategy
    from lightning_shard.strategies.precision import ShardPrecision

__version__ = "0.1.0"

__all__ = [
    "CheckpointCorruptError", "CheckpointError", "CheckpointMismatchError", "CheckpointNotFoundError",
    "CheckpointReplacedError", "CheckpointUnreachableError", "ConfigurationError", "DataError", "EMACallback",
    "Float8", "LossScaling", "MaterializationError", "MeshConfig", "MeshError", "OptimizerOffload",
    "ParameterOffload", "PrecisionContractError", "PrecisionError", "PrecisionPolicy", "PreemptionConfig",
    "ShardCLI", "ShardDDPStrategy", "ShardDeepSpeedStrategy", "ShardError", "ShardFSDPStrategy",
    "ShardPrecision", "Stage3Options", "UnitRule", "WrappingError", "ZeroBuckets", "ZeroPlusPlus", "__version__",
    "full_parameters", "full_tensor", "load_from_checkpoint", "load_pretrained", "set_full_tensor", "unshard",
]  # fmt: skip

# Public names, whose modules import engines or jsonargparse.
_MODULES = {
    "callbacks.ema": "EMACallback",
    "checkpoint.foreign.pretrained_weights": "load_pretrained",
    "cluster.preemption": "PreemptionConfig",
    "commands.cli": "ShardCLI",
    "engines.units": "UnitRule",
    "engines.zero.config.fields": "OptimizerOffload ParameterOffload Stage3Options ZeroBuckets ZeroPlusPlus",
    "mesh": "MeshConfig",
    "precision.float8": "Float8",
    "precision.loss_scale": "LossScaling",
    "precision.policy": "PrecisionPolicy",
    "run.full_tensors": "full_parameters full_tensor load_from_checkpoint set_full_tensor unshard",
    "strategies.ddp": "ShardDDPStrategy",
    "strategies.deepspeed": "ShardDeepSpeedStrategy",
    "strategies.fsdp": "ShardFSDPStrategy",
    "strategies.precision": "ShardPrecision",
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "tools"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        near = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _is_the_program() -> bool:
    """Whether this process runs ``lightning-shard``, which registers late: help needs no Lightning."""
    name = os.path.basename((sys.argv or [""])[0])  # "-m" while Python looks for the module
    return name == "lightning-shard" or (name == "-m" and __name__ in sys.orig_argv)


if not _is_the_program():
    register()
