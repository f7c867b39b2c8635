"""Which modules become shard units: pure functions over a module tree, nothing is changed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_shard.errors import WrappingError

UnitSpec = Literal["auto"] | int | list[str]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A set of modules whose parameters are gathered together; more than one only where they share parameters."""

    names: tuple[str, ...]
    """FQNs of the modules in the root."""

    modules: tuple[nn.Module, ...]


def find_units(root: nn.Module, spec: UnitSpec) -> list[Unit]:
    """The shard units below ``root``, inner before outer, in registration order.

    ``root`` is not among them: it takes every parameter that no unit has.

    Args:
        root: the LightningModule.
        spec: "auto": a Hugging Face model's ``_no_split_modules``, else the repeated blocks of ``ModuleList`` and
            ``Sequential`` containers; a list: class names; a number: the smallest modules that have at least that
            many parameters which no inner unit has taken.

    Raises:
        WrappingError: a class name that matches nothing or is no class to shard.
    """
    if isinstance(spec, str) and spec != "auto":
        raise WrappingError(f"units is {spec!r}, but must be 'auto', a list of class names or a number of parameters.")
    if isinstance(spec, int) and (isinstance(spec, bool) or spec < 1):
        raise WrappingError(f"units is {spec!r}, but a number of parameters must be at least 1.")
    if spec == "auto":
        names = _no_split_classes(root)
        modules = _by_class(root, names) if names else _repeated_blocks(root)
    elif isinstance(spec, int):
        modules = _by_size(root, spec)
    else:
        assert not isinstance(spec, str)
        _check_names(root, spec)
        modules = _by_class(root, set(spec))
    return _merge_shared(_with_parameters(modules))


def _children_first(module: nn.Module, name: str = "", seen: set[nn.Module] | None = None) -> dict[str, nn.Module]:
    """All modules below and including ``module``, children before parents, each object once."""
    seen = set() if seen is None else seen
    found: dict[str, nn.Module] = {}
    if module in seen:
        return found
    seen.add(module)
    for child_name, child in module.named_children():
        found.update(_children_first(child, f"{name}.{child_name}" if name else child_name, seen))
    found[name] = module
    return found


def _below(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in _children_first(root).items() if module is not root}


def class_name(module: nn.Module) -> str:
    """The name of a module's own class, also once an engine has put its own class in front (``FSDPBlock``)."""
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch.distributed") and cls.__module__ != "abc":
            return cls.__name__
    return type(module).__name__


def _no_split_classes(root: nn.Module) -> set[str]:
    """Class names that Hugging Face models declare as not to be split."""
    names: set[str] = set()
    for module in root.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    present = {class_name(m) for m in root.modules()}
    return names & present


def _by_class(root: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    wanted = set(names)
    return {fqn: m for fqn, m in _below(root).items() if class_name(m) in wanted}


def _check_names(root: nn.Module, names: list[str]) -> None:
    present = Counter(class_name(m) for m in _below(root).values() if any(True for _ in m.parameters()))
    missing = [n for n in names if n not in present]
    if missing:
        listing = ", ".join(f"{name} (x{count})" for name, count in sorted(present.items())) or "none"
        raise WrappingError(
            f"units names {', '.join(map(repr, missing))}, but the model has no module of that class with parameters. "
            f"Classes that are there: {listing}."
        )
    containers = [n for n in names if n in ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")]
    if containers:
        raise WrappingError(
            f"units names {', '.join(map(repr, containers))}, which has no forward and so can't be a shard unit. "
            "Name the class of the modules inside it."
        )


def _repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Members of containers that hold at least two modules of one class; outermost such containers only."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        counts: Counter[type[nn.Module]] = Counter()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            counts.update(
                type(m) for m in module.children() if _is_block(m, in_list=not isinstance(module, nn.Sequential))
            )
        for child_name, child in module.named_children():
            fqn = f"{name}.{child_name}" if name else child_name
            if counts[type(child)] >= 2:
                found.setdefault(fqn, child)
            else:
                visit(child, fqn)

    visit(root, "")
    # One module object reached by two names is one unit.
    unique = {id(m): fqn for fqn, m in reversed(found.items())}
    return {fqn: m for fqn, m in found.items() if unique[id(m)] == fqn}


def _is_block(module: nn.Module, *, in_list: bool) -> bool:
    """Whether a container's member is worth a unit: it has parameters, and is more than a lone layer of a stack."""
    has_parameters = any(True for _ in module.parameters())
    return has_parameters and (in_list or any(True for _ in module.children()))


def _by_size(root: nn.Module, smallest: int) -> dict[str, nn.Module]:
    taken: set[int] = set()
    found: dict[str, nn.Module] = {}
    for fqn, module in _below(root).items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            continue
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= smallest:
            taken.update(id(p) for p in free)
            found[fqn] = module
    return found


def _with_parameters(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {fqn: m for fqn, m in modules.items() if any(True for _ in m.parameters())}


def _merge_shared(modules: dict[str, nn.Module]) -> list[Unit]:
    """Put modules that share a parameter into one unit, because a parameter belongs to exactly one.

    Where one of the sharing modules holds the other, the outer takes all. A module that shares a parameter with
    one outside every unit is dropped, and its parameters go to the root.
    """
    kept = dict(modules)
    groups: dict[str, int] = {fqn: i for i, fqn in enumerate(kept)}
    holders: dict[int, list[str]] = {}
    for fqn, module in kept.items():
        for parameter in module.parameters():
            holders.setdefault(id(parameter), []).append(fqn)
    for fqns in holders.values():
        outermost = [f for f in fqns if not any(f.startswith(f"{other}.") for other in fqns)]
        if len(outermost) < 2:
            continue
        for inner in set(fqns) - set(outermost):
            kept.pop(inner, None)
        first = groups[outermost[0]]
        old = {groups[f] for f in outermost}
        groups.update({f: first for f, g in groups.items() if g in old})
    units: dict[int, list[str]] = {}
    for fqn in kept:
        units.setdefault(groups[fqn], []).append(fqn)
    return [Unit(names=tuple(names), modules=tuple(kept[n] for n in names)) for names in units.values()]


def drop_units_tied_to(root: nn.Module, units: list[Unit]) -> list[Unit]:
    """``units`` without those that share a parameter with a module outside every unit.

    Such a parameter is reached both through the unit and through the root, and so must be the root's.
    """
    inside = {m for unit in units for top in unit.modules for m in top.modules()}
    outside = {id(p) for module in root.modules() if module not in inside for p in module.parameters(recurse=False)}
    return [unit for unit in units if not any(id(p) in outside for module in unit.modules for p in module.parameters())]
