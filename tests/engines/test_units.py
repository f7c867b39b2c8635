"""Which modules become shard units: every parameter has exactly one home, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_shard.engines.units import UnitRule, compute_dtypes, find_units
from lightning_shard.errors import WrappingError
from lightning_shard.tensors.names import class_name
from tests.models import llama


class Layer(nn.Module):
    """A block with a parameter of its own and two layers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.gain


class Root(nn.Module):
    """Holds whatever it is given, in that order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def names(root: nn.Module, spec: object, **options: bool) -> list[str]:
    return [unit.name for unit in find_units(root, spec, **options)]  # type: ignore[arg-type]


def layers(count: int) -> list[nn.Module]:
    return [Layer() for _ in range(count)]


def numbered(parts: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): part for index, part in enumerate(parts)})


def mixed() -> nn.Module:
    return Root(embed=nn.Embedding(3, 4), blocks=nn.ModuleList(layers(2)), head=nn.Linear(4, 3))


def repeated() -> nn.Module:
    return nn.ModuleList([Layer()] * 3)


@pytest.mark.parametrize(
    ("make", "spec", "expected"),
    [
        (mixed, ["Layer"], "blocks.0 blocks.1"),
        (mixed, ["Embedding", "Layer"], "embed blocks.0 blocks.1"),
        # Inner units come before outer ones, and the root is none of its own.
        (lambda: Root(blocks=nn.ModuleList(layers(1))), ["Layer", "Linear"], "blocks.0.a blocks.0.b blocks.0"),
        # By size: Linear(4, 4) has 20 parameters, gain 4, a whole Layer 44.
        (lambda: Root(layer=Layer()), 20, "layer.a layer.b"),
        (lambda: Root(layer=Layer()), 21, "layer"),
        (lambda: Root(layer=Layer()), 4, "layer.a layer.b layer"),
        # "auto" takes the outermost repeated blocks of lists, dicts and sequences.
        (lambda: Root(first=nn.Linear(4, 4), stack=nn.ModuleList(layers(2))), "auto", "stack.0 stack.1"),
        (lambda: Root(stack=numbered(layers(2))), "auto", "stack.0 stack.1"),
        (lambda: Root(stack=repeated()), "auto", "stack.0"),
        (lambda: Root(s=nn.ModuleList(Root(parts=nn.ModuleList(layers(2))) for _ in range(2))), "auto", "s.0 s.1"),
        # A list has no forward for a unit's hooks.
        (lambda: Root(n=nn.ModuleList(nn.ModuleList(layers(2)) for _ in "ab")), "auto", "n.0.0 n.0.1 n.1.0 n.1.1"),
        # Lone layers and single blocks are the root's.
        (lambda: Root(mlp=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), one=nn.ModuleList(layers(1))), "auto", ""),
        # Hugging Face's models name their blocks.
        (lambda: Root(m=llama(tie_word_embeddings=True)), "auto", "m.model.layers.0 m.model.layers.1"),
    ],
    ids=[str(number) for number in range(13)],
)
def test_units_of_plain_trees(make: Callable[[], nn.Module], spec: object, expected: str) -> None:
    root = make()
    assert names(root, spec) == expected.split()
    assert [unit.module for unit in find_units(root, spec)] == [root.get_submodule(n) for n in expected.split()]  # type: ignore[arg-type]


def test_auto_prefers_what_the_model_declares_to_repetition() -> None:
    root = Root(stack=nn.ModuleList(layers(2)), head=Layer())
    root.head._no_split_modules = ["Linear", "NotHere"]  # type: ignore[assignment]
    units = names(root, "auto")
    assert "head.a" in units
    assert "stack.0" not in units


# Sharing: a parameter belongs to exactly one unit.


def test_ties_between_modules_side_by_side_are_the_roots() -> None:
    blocks = layers(4)
    blocks[3].a.weight = blocks[1].a.weight  # type: ignore[union-attr]
    assert names(Root(blocks=nn.ModuleList(blocks)), ["Layer"]) == ["blocks.0", "blocks.2"]
    own = Root(layer=Layer(), other=Layer())
    own.register_parameter("own", own.layer.gain)  # type: ignore[arg-type, union-attr]
    assert names(own, ["Layer"]) == ["other"]


@st.composite
def _trees(draw: st.DrawFn) -> nn.Module:
    """Random trees of Roots and Layers with shared modules and tied parameters anywhere."""
    modules: list[nn.Module] = [Layer(2) for _ in range(draw(st.integers(2, 5)))]
    for _ in range(draw(st.integers(1, 3))):
        children = draw(st.lists(st.sampled_from(range(len(modules))), min_size=1, max_size=3, unique=True))
        modules.append(Root(**{f"m{i}": modules[i] for i in children}))
    root = Root(**{f"top{i}": m for i, m in enumerate(modules) if draw(st.booleans())})
    linears = [m for m in root.modules() if isinstance(m, nn.Linear)]
    for _ in range(draw(st.integers(0, 3)) if linears else 0):
        one, other = draw(st.sampled_from(linears)), draw(st.sampled_from(linears))
        one.weight = other.weight
    return root


@given(root=_trees(), spec=st.sampled_from([["Layer"], ["Linear"], ["Layer", "Linear", "Root"], 1, 6, 20, "auto"]))
def test_every_parameter_has_one_home(root: nn.Module, spec: object) -> None:
    present = {class_name(m) for m in root.modules() if m is not root}
    if isinstance(spec, list) and not present.issuperset(spec):
        return
    for with_children in (False, True):
        units = find_units(root, spec, with_children=with_children)  # type: ignore[arg-type]
        assert len({unit.module for unit in units}) == len(units)
        by_name = dict(root.named_modules())
        assert all(by_name[unit.name] is unit.module for unit in units)
        # As fully_shard takes them, in order: a unit has what is below its modules and in no unit before it.
        home: dict[nn.Module, int] = {}
        for place, unit in enumerate(units):
            for module in _below(unit.module, set(home)):
                assert home.setdefault(module, place) == place
        for place, unit in enumerate(units):
            assert home[unit.module] == place, "an outer unit came before an inner one"
        # On every path from the root a parameter is reached through its one home.
        homes: dict[nn.Parameter, set[int | None]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            nearest = _nearest(root, path, {unit.module: p for p, unit in enumerate(units)})
            for parameter in module.parameters(recurse=False):
                homes.setdefault(parameter, set()).add(nearest)
        assert all(len(found) == 1 for found in homes.values())


def _below(top: nn.Module, taken: set[nn.Module]) -> set[nn.Module]:
    found = {top}
    for child in top.children():
        if child not in taken:
            found |= _below(child, taken)
    return found


def _nearest(root: nn.Module, path: str, units: dict[nn.Module, int]) -> int | None:
    nearest, module = None, root
    for part in path.split(".") if path else []:
        module = module.get_submodule(part)
        nearest = units.get(module, nearest)
    return nearest


# With the children of the root, for manual optimization.


def test_children_become_units_and_containers_give_theirs() -> None:
    root = Root(generator=Root(blocks=nn.ModuleList(layers(2))), critics=nn.ModuleList(layers(1)), relu=nn.ReLU())
    expected = ["generator.blocks.0", "generator.blocks.1", "generator", "critics.0"]
    # The generator has nothing that its blocks have not taken, but its hooks are harmless.
    assert names(root, "auto", with_children=True) == expected
    assert names(root, ["Layer"], with_children=True) == expected


def test_attention_is_never_cut_apart() -> None:
    # MultiheadAttention reads its output projection's weight without calling it, so that hooks would not gather it,
    # and rounds otherwise as a unit of its own.
    root = Root(layer=nn.TransformerEncoderLayer(8, 2, 8))
    assert names(root, 16) == [
        "layer.linear1",
        "layer.linear2",
        "layer.norm1",
        "layer.norm2",
        "layer",
    ]
    assert names(root, ["MultiheadAttention"]) == ["layer.self_attn"]
    with pytest.raises(WrappingError, match=r"'NonDynamicallyQuantizableLinear', whose forward never runs"):
        find_units(root, ["NonDynamicallyQuantizableLinear"])


def test_the_first_rule_that_names_a_module_counts() -> None:
    root = Root(embed=nn.Embedding(30, 4), blocks=nn.ModuleList(layers(3)), head=nn.Linear(4, 3))
    first, wide = UnitRule(pattern=r"blocks\.0", compute="fp32"), UnitRule(modules=["Linear"], compute="bf16")
    units = find_units(root, ["Layer", first, UnitRule(modules=100), wide])
    found = {unit.name: unit.rule.compute for unit in units}
    assert [(n, c) for n, c in found.items() if n in ("embed", "blocks.0", "blocks.1", "head")] == [
        ("embed", None),
        ("blocks.0", "fp32"),
        ("blocks.1", None),
        ("head", "bf16"),
    ]
    dtypes = compute_dtypes(units, torch.float16)
    assert dtypes[root.blocks[0]] == torch.float32  # type: ignore[index]
    assert dtypes[root.blocks[0].a] == torch.bfloat16  # type: ignore[index, union-attr]
    assert dtypes[root.blocks[1]] == torch.float16  # type: ignore[index]


def test_settings_that_sharing_would_lose_are_refused() -> None:
    root = Root(embed=nn.Embedding(3, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 3))
    root.head.weight = root.embed.weight  # type: ignore[union-attr, assignment]
    wide = UnitRule(pattern="head", compute="fp32")
    for spec in ([wide], [wide, "Embedding"]):
        with pytest.raises(WrappingError, match=r"units gives (head|embed) settings of its own, but it shares"):
            find_units(root, spec)  # type: ignore[arg-type]


# Mistakes.


def test_names_of_no_class_to_shard_are_refused() -> None:
    root = Root(blocks=nn.ModuleList(layers(2)), norm=nn.LayerNorm(4), relu=nn.ReLU())
    with pytest.raises(WrappingError, match=r"'Blok'.*Layer \(x2\), LayerNorm \(x1\), Linear \(x4\)") as caught:
        find_units(root, ["Layer", "Blok"])
    assert "ReLU" not in str(caught.value), "it has no parameters"
    with pytest.raises(WrappingError, match="'ModuleList', whose forward never runs"):
        find_units(root, ["ModuleList"])


@pytest.mark.parametrize("spec", ["Layer", 0, -5, True])
def test_other_values_are_refused(spec: object) -> None:
    with pytest.raises(WrappingError, match=rf"units(\.modules)? is {spec!r}"):
        find_units(Root(layer=Layer()), spec)  # type: ignore[arg-type]
