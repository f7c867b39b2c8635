"""Imports run in no circle and point down through the layers, and nothing below Lightning's line imports Lightning.

What is excepted stands in a table, and has to leave it when it is no exception any more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent

# From the top down; a part imports from its own row and those below it. "" is the package's own __init__.
LAYERS = (
    {"", "__main__", "commands", "tools", "hugging_face", "pytorch_lightning"},
    {"registry"},
    {"strategies"},
    {"run"},
    {"callbacks"},
    {"_lightning"},
    # Nothing from here on knows of Lightning.
    {"planning", "migrate", "meters"},
    {"engines"},
    {"checkpoint"},
    {"precision"},
    {"resume"},
    {"tensors"},
    {"cluster", "mesh", "memory"},
    {"ranks"},
    {"errors", "private_names", "versions", "text", "arguments", "devices"},
)
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
BELOW_LIGHTNING = set().union(*LAYERS[6:])

# Exceptions: a module, and the part above it that it imports.
UPWARD: set[tuple[str, str]] = set()

# Exceptions: modules below the line that import Lightning.
WITH_LIGHTNING: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name."""

    module: str
    name: str = ""
    line: int
    when: str
    """``"import"``, ``"call"`` (inside a function) or ``"typing"`` (for type checkers alone)."""


def imports(source: str) -> Iterator[Import]:
    """Every import statement of a module, name by name."""
    return _imports(ast.parse(source), "import")


def _imports(node: ast.AST, when: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module=alias.name, line=node.lineno, when=when)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            yield Import(module=node.module or "", name=alias.name, line=node.lineno, when=when)
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for child in node.body:
            yield from _imports(child, "typing")
        for child in node.orelse:
            yield from _imports(child, when)
    else:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, "call" if inside else when)


def module_name(path: Path) -> str:
    """``lightning_shard.engines`` of ``engines/__init__.py``, ``lightning_shard.mesh`` of ``mesh.py``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imported_module(found: Import) -> str:
    """The module of this package that an import names, "" for another's."""
    whole = f"{found.module}.{found.name}"
    return next((name for name in (whole, found.module) if name in SOURCES), "")


def part_of(module: str) -> str:
    """``engines`` of ``lightning_shard.engines.fsdp``."""
    return [*module.split("."), ""][1]


def layer_of(part: str) -> int:
    """The number of a part's row, from the top."""
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one circle, from a module back to itself; empty where there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for following in edges.get(path[-1], ()):
            if following in path:
                return [*path[path.index(following) :], following]
            if following not in done and (found := search([*path, following])):
                return found
        done.add(path[-1])
        return []

    return next((found for module in edges if module not in done and (found := search([module]))), [])


def edges(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Each module to those that it imports when it is imported itself."""
    return {
        module: {imported_module(found) for found in imports(source) if found.when == "import"} - {""}
        for module, source in sources.items()
    }


def upward(module: str, source: str) -> set[tuple[str, str]]:
    """The module and each part above its own that it imports, at any time."""
    imported = {part_of(found) for found in map(imported_module, imports(source)) if found}
    return {(module, part) for part in imported if layer_of(part) < layer_of(part_of(module))}


def imports_lightning(source: str) -> bool:
    """Whether a module imports Lightning, at any time."""
    return any(found.module.partition(".")[0] in LIGHTNING for found in imports(source))


def test_no_circle_of_imports() -> None:
    assert circle(edges(SOURCES)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        pytest.param("from lightning_shard.mesh import MeshConfig", True, id="module level"),
        pytest.param("class A:\n    from lightning_shard import mesh", True, id="class"),
        pytest.param("try:\n    import lightning_shard.mesh\nexcept ImportError:\n    pass", True, id="try"),
        pytest.param("def f():\n    from lightning_shard import mesh", False, id="function"),
        pytest.param("if TYPE_CHECKING:\n    from lightning_shard import mesh", False, id="type checkers"),
    ],
)
def test_a_circle_is_found(source: str, found: bool) -> None:
    closed = circle(edges({**SOURCES, "lightning_shard.errors": source}))
    assert ({"lightning_shard.errors", "lightning_shard.mesh"} <= set(closed)) is found
    assert found or not closed


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in SOURCES} - set().union(*LAYERS) == set()


def test_imports_point_down() -> None:
    found = set().union(*(upward(module, source) for module, source in SOURCES.items()))
    assert found - UPWARD == set(), "these imports point up"
    assert UPWARD - found == set(), "these exceptions are no more: remove them"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import lightning_shard.commands.cli", {"commands"}),
        ("from lightning_shard import registry, errors", {"registry"}),
        ("from lightning_shard import ShardCLI", {""}),
        ("def f():\n    from lightning_shard.planning import fake", {"planning"}),
        ("if TYPE_CHECKING:\n    from lightning_shard.engines.units import Unit", {"engines"}),
        ("from lightning_shard.errors import ShardError\nimport torch", set()),
    ],
    ids=["module", "two", "public name", "in a function", "for type checkers", "below"],
)
def test_an_import_that_points_up_is_found(source: str, parts: set[str]) -> None:
    assert upward("lightning_shard.mesh", source) == {("lightning_shard.mesh", part) for part in parts}


def test_nothing_below_the_line_imports_lightning() -> None:
    found = {m for m, source in SOURCES.items() if part_of(m) in BELOW_LIGHTNING and imports_lightning(source)}
    assert found - WITH_LIGHTNING == set(), "these modules are to know nothing of Lightning"
    assert WITH_LIGHTNING - found == set(), "these exceptions are no more: remove them"


@pytest.mark.parametrize("module", SOURCES)
def test_the_namespace_is_lightning(module: str) -> None:
    named = {found.module.partition(".")[0] for found in imports(SOURCES[module])}
    assert named & LIGHTNING <= {"lightning"}


def test_an_import_of_lightning_is_found() -> None:
    assert imports_lightning("def f():\n    from lightning.pytorch import Trainer")
    assert imports_lightning("import lightning_fabric.utilities as u")
    assert not imports_lightning("import lightning_shard.mesh")


def test_no_test_file_is_too_long_to_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob("*.py")}
    assert [str(path) for path, length in lengths.items() if length > 400] == []
