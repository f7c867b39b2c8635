"""What importing the package costs, what it exports, and that Lightning's private names are used in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_shard
from tests.test_layers import imports

PACKAGE = Path(lightning_shard.__file__).parent

MODULES = sorted(PACKAGE.rglob("*.py"))


def test_exact_public_names() -> None:
    assert lightning_shard.__all__ == [
        "CheckpointCorruptError",
        "CheckpointError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "ConfigurationError",
        "DataError",
        "LossScaling",
        "MaterializationError",
        "MeshConfig",
        "MeshError",
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
        "WrappingError",
        "__version__",
        "full_tensor",
        "load_from_checkpoint",
        "load_pretrained",
        "set_full_tensor",
    ]
    assert [name for name in lightning_shard.__all__ if not hasattr(lightning_shard, name)] == []
    assert set(lightning_shard.__all__) <= set(dir(lightning_shard))


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ShardFDSPStrategy'"):
        _ = lightning_shard.ShardFDSPStrategy


def test_every_error_is_public() -> None:
    from lightning_shard import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {name for name in lightning_shard.__all__ if name.endswith("Error")}


def test_version_is_that_of_the_project() -> None:
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == lightning_shard.__version__


def test_import_is_light_and_registers_the_names() -> None:
    code = """
import sys
import lightning
before = set(sys.modules)
import lightning_shard
from lightning.pytorch.strategies import StrategyRegistry
assert "shard_fsdp_aligned" in StrategyRegistry
for module in sorted(set(sys.modules) - before):
    print(module)
"""
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in added if not name.startswith("lightning_shard")} <= {"yaml"}
    assert set(added) == {"lightning_shard", *(f"lightning_shard.{name}" for name in ("errors", "registry", "text"))}


def test_strategies_import_neither_deepspeed_nor_transformers() -> None:
    code = """
import sys
import lightning  # torchmetrics imports transformers where it is installed
before = set(sys.modules)
from lightning_shard import *
from lightning_shard.registry import PRESETS, build
for name in PRESETS:
    if "deepspeed" not in name:
        build(name)
print(*{"deepspeed", "transformers"} & (set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_lightning_are_used_in_one_place(path: Path) -> None:
    if PACKAGE / "_lightning" in path.parents:
        return
    source = path.read_text()
    for found in imports(source):
        words = (*found.module.split("."), found.name)
        private = [word for word in words if re.match(r"_(?!_)", word) and words[0] == "lightning"]
        assert not private, f"only _lightning/ imports Lightning's {private}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            owner = ast.unparse(node.value).split(".")[-1]
            assert owner not in ("trainer", "lightning_module", "pl_module"), f"{ast.unparse(node)}: see _lightning/"
