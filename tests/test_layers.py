"""Imports run in no circle and point down through the layers, and nothing below Lightning's line imports Lightning."""

from __future__ import annotations

import ast
import functools
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


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name."""

    module: str
    name: str = ""
    when: str
    """``"import"``, ``"call"`` (inside a function) or ``"typing"`` (for type checkers alone)."""


@functools.cache
def imports(source: str) -> list[Import]:
    """Every import statement of a module, name by name."""
    return list(_imports(ast.parse(source), "import"))


def _imports(node: ast.AST, when: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(module=alias.name, when=when) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (Import(module=node.module or "", name=alias.name, when=when) for alias in node.names)
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
        ("try:\n    import lightning_shard.mesh\nexcept ImportError:\n    pass", True),
        ("def f():\n    from lightning_shard import mesh", False),
        ("if TYPE_CHECKING:\n    from lightning_shard import mesh", False),
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
    assert found == set(), "these imports point up"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("from lightning_shard import registry, errors", {"registry"}),
        ("from lightning_shard import ShardCLI", {""}),
        ("def f():\n    from lightning_shard.planning import fake", {"planning"}),
    ],
)
def test_an_import_that_points_up_is_found(source: str, parts: set[str]) -> None:
    assert upward("lightning_shard.mesh", source) == {("lightning_shard.mesh", part) for part in parts}


def test_nothing_below_the_line_imports_lightning() -> None:
    found = {m for m, source in SOURCES.items() if part_of(m) in BELOW_LIGHTNING and imports_lightning(source)}
    assert found == set(), "these modules are to know nothing of Lightning"


def test_the_namespace_is_lightning() -> None:
    named = {found.module.partition(".")[0] for source in SOURCES.values() for found in imports(source)}
    assert named & LIGHTNING == {"lightning"}


def test_an_import_of_lightning_is_found() -> None:
    assert imports_lightning("def f():\n    from lightning.pytorch import Trainer")
    assert imports_lightning("import lightning_fabric.utilities as u")
    assert not imports_lightning("import lightning_shard.mesh")


def test_no_test_file_is_too_long_to_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob("*.py")}
    assert [str(path) for path, length in lengths.items() if length > 400] == []
