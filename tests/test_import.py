"""What importing the package costs, what it exports, and that its layers depend downwards only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent

# From the bottom up; a module imports from its own layer and those below it.
LAYERS = [
    {"errors", "private_names", "text", "ranks", "memory", "mesh", "tensors"},
    {"precision", "checkpoint", "resume", "cluster"},
    {"engines"},
    {"meters", "migrate", "planning"},
    {"_lightning"},
    {"plugins", "callbacks"},
    {"strategies"},
    {
        "",
        "__main__",
        "commands",
        "full_tensors",
        "loading",
        "registry",
    },
]
# The layers that know nothing of Lightning.
BELOW_LIGHTNING = set().union(*LAYERS[:4])

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


def test_every_module_has_a_layer() -> None:
    assert {_part(path) for path in MODULES} <= set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = _part(path)
    for module, name in _imports(path):
        if module.split(".")[0] == "lightning_shard":
            imported = _part_of_import(module, name)
            assert _layer(imported) <= _layer(part), f"{part or '__init__'} imports {module}.{name}, which lies above"
        if module.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"):
            assert module.split(".")[0] == "lightning", f"{module}: the namespace is lightning"
            assert part not in BELOW_LIGHTNING, f"{part} is to know nothing of Lightning but imports {module}"
            private = [word for word in (*module.split("."), name) if re.match(r"_(?!_)", word)]
            assert not private or part == "_lightning", f"only _lightning/ imports Lightning's {private}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lightning_objects_keep_their_private_attributes(path: Path) -> None:
    if _part(path) == "_lightning":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            owner = ast.unparse(node.value).split(".")[-1]
            assert owner not in ("trainer", "lightning_module", "pl_module"), f"{ast.unparse(node)}: see _lightning/"


def test_the_layering_test_sees_nested_and_relative_imports(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def f():\n    from lightning_shard import commands\n    import lightning.pytorch._x as x\n")
    assert list(_imports(source)) == [("lightning_shard", "commands"), ("lightning.pytorch._x", "")]
    assert _part_of_import("lightning_shard", "commands") == "commands"
    assert _part_of_import("lightning_shard", "ShardCLI") == ""
    assert _layer("commands") > _layer("mesh")


def _part(path: Path) -> str:
    """``engines`` of ``engines/fsdp.py``, ``mesh`` of ``mesh.py``, "" of the package's own ``__init__``."""
    part = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "" if part == "__init__" else part


def _part_of_import(module: str, name: str) -> str:
    parts = [*module.split("."), name][1:]
    names = {_part(path) for path in MODULES}
    return parts[0] if parts and parts[0] in names else ""


def _layer(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every import statement, those inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                yield node.module or "", alias.name
