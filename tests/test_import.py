"""What importing the package costs, what it exports, and that Lightning's private names are used in one place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent


def test_exact_public_names() -> None:
    assert lightning_shard.__all__ == [
        "CheckpointCorruptError",
        "CheckpointError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "CheckpointReplacedError",
        "CheckpointUnreachableError",
        "ConfigurationError",
        "DataError",
        "EMACallback",
        "Float8",
        "LossScaling",
        "MaterializationError",
        "MeshConfig",
        "MeshError",
        "OptimizerOffload",
        "ParameterOffload",
        "PrecisionContractError",
        "PrecisionError",
        "PrecisionPolicy",
        "PreemptionConfig",
        "ShardCLI",
        "ShardDDPStrategy",
        "ShardDeepSpeedStrategy",
        "ShardError",
        "ShardFSDPStrategy",
        "ShardPrecision",
        "Stage3Options",
        "UnitRule",
        "WrappingError",
        "ZeroBuckets",
        "ZeroPlusPlus",
        "__version__",
        "full_parameters",
        "full_tensor",
        "load_from_checkpoint",
        "load_pretrained",
        "set_full_tensor",
        "unshard",
    ]
    assert [name for name in lightning_shard.__all__ if not hasattr(lightning_shard, name)] == []
    assert set(lightning_shard.__all__) <= set(dir(lightning_shard))
    assert "plan" in lightning_shard.__getattr__("tools").__all__
    assert lightning_shard.callbacks.RunPageCallback.__module__ == "lightning_shard.callbacks.run_page"


def test_type_checkers_see_the_names_that_are_imported_when_used() -> None:
    statements = ast.parse(Path(lightning_shard.__file__).read_text()).body
    (block,) = (s for s in statements if isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING")
    seen = {f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    assert seen == {f"{module}.{name}" for name, module in lightning_shard._LAZY.items()}


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ShardFDSPStrategy'"):
        _ = lightning_shard.ShardFDSPStrategy


FACTS = """
import json, logging, sys, warnings
import lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
owners = [pl.LightningModule, pl.LightningDataModule, TorchCheckpointIO, type(StrategyRegistry)]
look = lambda: [dict(vars(o)) for o in owners] + [list(sys.meta_path), sys.excepthook, logging.getLogRecordFactory(),
    warnings.formatwarning, StrategyRegistry.available_strategies.__func__]
before, modules = look(), set(sys.modules)
import lightning_shard
facts = {"added": sorted(set(sys.modules) - modules), "unchanged": look() == before}
off = dict.fromkeys(("logger", "enable_checkpointing"), False)
pl.Trainer(strategy="shard_ddp", accelerator="cpu", devices=1, **off)
facts["with one name"] = sorted(set(sys.modules) - modules)
from lightning_shard import *
from lightning_shard.registry import PRESETS, build
for name in PRESETS:
    if "deepspeed" not in name:
        build(name)
facts["with all names"] = sorted(set(sys.modules) - modules)
print(json.dumps(facts))
"""


def test_an_import_adds_the_names_alone_and_changes_nothing() -> None:
    run = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, check=True)
    facts = json.loads(run.stdout.splitlines()[-1])
    assert set(facts["added"]) == {"lightning_shard", *(f"lightning_shard.{n}" for n in ("errors", "registry", "text"))}
    assert facts["unchanged"]
    assert "lightning_shard.strategies.ddp" in facts["with one name"]
    assert {"lightning_shard.strategies.fsdp", "lightning_shard.commands"} & set(facts["with one name"]) == set()
    assert {"deepspeed", "transformers"} & set(facts["with all names"]) == set()
