"""Choose the modules that become shard units, by functions that do not change the module tree."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchmetrics import Metric

from lightning_shard.arguments import checked_fields
from lightning_shard.errors import WrappingError
from lightning_shard.precision.policy import DTYPES
from lightning_shard.precision.words import DType
from lightning_shard.tensors.names import class_name, outside_graphs

ClassNames = list[str | type[nn.Module]]  # Classes of modules, as a user names them.


def class_names(classes: ClassNames) -> list[str]:
    return [found if isinstance(found, str) else found.__name__ for found in classes]


@checked_fields("units", error=WrappingError)
@dataclass(frozen=True, kw_only=True)
class UnitRule:
    """Shard units with settings of their own, as an entry of a list of units.

    Raises:
        WrappingError: not exactly one of ``modules`` and ``pattern``, or a value that can't work.
    """

    modules: Literal["auto"] | int | ClassNames | None = None
    """The modules, as in ``units`` itself: "auto", a number of parameters, or a list of classes or their names."""

    pattern: str | None = None
    """Instead of ``modules``: a regular expression for whole names of modules in the LightningModule, such as
    ``model\\.layers\\.[01]``."""

    reshard_after_forward: bool | int | None = None
    """When these units are freed; null: as by the strategy's argument of that name."""

    compute: DType | None = None
    """Dtype of their modules' inputs, parameters and outputs in forward; null: the precision's. Masters, reduction and
    optimizer state do not change."""

    def __post_init__(self) -> None:
        if (self.modules is None) == (self.pattern is None):
            shown = f"modules is {self.modules!r} and pattern is {self.pattern!r}"
            raise WrappingError(f"{shown} in an entry of units, but it must have one of them. Remove the other.")
        if isinstance(self.modules, list):
            object.__setattr__(self, "modules", class_names(self.modules))
        if isinstance(self.modules, int) and self.modules < 1:
            raise WrappingError(f"units is {self.modules!r}, but a number of parameters must be at least 1.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise WrappingError(f"units' pattern {self.pattern!r} is no regular expression: {error}.") from error

    @property
    def special(self) -> bool:
        return self.reshard_after_forward is not None or self.compute is not None


UnitSpec = Literal["auto"] | int | list[str | type[nn.Module] | UnitRule]


def unit_rules(spec: UnitSpec) -> tuple[UnitRule, ...]:
    """``spec`` as rules: a list's rules in order, followed by one rule with all its classes."""
    if not isinstance(spec, list):
        return (UnitRule(modules=spec),)
    classes = [entry for entry in spec if not isinstance(entry, UnitRule)]
    rules = [entry for entry in spec if isinstance(entry, UnitRule)]
    return (*rules, *([UnitRule(modules=classes)] if classes else []))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered together."""

    name: str  # FQN in the root.
    module: nn.Module
    rule: UnitRule = field(default_factory=lambda: UnitRule(modules="auto"))  # The rule that chose it.
    standalone: bool = False  # An embedding or a head next to blocks, neither recomputed nor compiled.


def compute_dtypes(units: Iterable[Unit], default: torch.dtype) -> dict[nn.Module, torch.dtype]:
    """The compute dtype of each module in ``units``, inner before outer, if not ``default``."""
    found: dict[nn.Module, torch.dtype] = {}
    for unit in units:
        dtype = DTYPES.get(unit.rule.compute or "", default)
        found = {**dict.fromkeys(unit.module.modules(), dtype), **found}
    return found


def find_units(root: nn.Module, spec: UnitSpec, *, with_children: bool = False) -> list[Unit]:
    """The shard units below ``root``, inner before outer, in registration order. ``root`` is not listed. It has every
    parameter that is in no unit. Each parameter belongs to one unit: a module that shares a parameter with a module
    outside itself is no unit, and its parameters belong to the unit around it or to the root.

    ``spec`` "auto": a Hugging Face model's ``_no_split_modules``, else the repeated blocks of ``ModuleList`` and
    ``Sequential``, and `_standalone` modules. A number: the smallest modules with at least that many parameters outside
    inner units. A list: classes and rules. The first rule that matches a module counts. ``with_children``: also each
    child of ``root``. WrappingError: a name matches nothing or no class to shard, or a rule has settings for a module
    that shares parameters.
    """
    chosen: dict[nn.Module, UnitRule] = {}
    for rule in unit_rules(spec):
        for module in _named_by(rule, root, {id(p) for m in chosen for p in m.parameters()}):
            chosen.setdefault(module, rule)
    standalone = _standalone(root, chosen) if spec == "auto" else {}
    chosen |= standalone
    if with_children:
        chosen = {**dict.fromkeys(_nearest_with_forward(root), UnitRule(modules="auto")), **chosen}
    chosen = _around_graphs(root, chosen)
    below = {fqn: m for fqn, m in _below(root).items() if m in chosen and _has_parameters(m)}
    kept = _drop_sharing_modules(root, below)
    if lost := [fqn for fqn, module in below.items() if fqn not in kept and chosen[module].special]:
        raise WrappingError(
            f"units gives {lost[0]} settings of its own, but it shares parameters with a module outside of it, and "
            "so is no unit. Leave it out, or give the settings to the module that has both."
        )
    return [Unit(name=fqn, module=m, rule=chosen[m], standalone=m in standalone) for fqn, m in kept.items()]


def _named_by(rule: UnitRule, root: nn.Module, taken: set[int]) -> Iterable[nn.Module]:
    """The modules that a rule matches. ``taken``: ids of the parameters of earlier rules' modules."""
    if rule.pattern is not None:
        return _by_pattern(root, rule.pattern)
    if isinstance(rule.modules, int):
        return _by_size(root, rule.modules, taken)
    if rule.modules == "auto":
        # Classes that Hugging Face models declare as not to be split.
        names = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        return [m for m in _below(root).values() if class_name(m) in names] or _repeated_blocks(root)
    named = class_names(rule.modules or [])
    below = _below(root).values()
    _check_names(named, filter(_has_parameters, below), "units", " with parameters")
    idle = {class_name(m) for m in below if not runs_forward(m)}
    if refused := [n for n in named if n in idle]:
        raise WrappingError(
            f"units names {', '.join(map(repr, refused))}, whose forward never runs and so can't be a shard unit. "
            "Name the class of the modules inside it, or of the module around it."
        )
    return [m for m in below if class_name(m) in named]


def _standalone(root: nn.Module, blocks: Collection[nn.Module]) -> dict[nn.Module, UnitRule]:
    """Embeddings and linear layers outside ``blocks`` that have at least as many parameters as the smallest block and
    share none. In the root they would stay gathered from forward to the end of backward. A linear layer is usually the
    head, whose backward is first, so it is not resharded before. Tied layers, used first and last, stay in the root.
    """
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    taken = {id(p) for block in blocks for p in block.parameters()}
    homes = Counter(id(p) for m in root.modules() for _, p in m.named_parameters(recurse=False, remove_duplicate=False))
    found: dict[nn.Module, UnitRule] = {}
    for module in _below(root).values() if sizes else ():
        own = [*module.parameters()]
        if not isinstance(module, nn.Embedding | nn.Linear) or not runs_forward(module):
            continue
        shared = any(id(p) in taken or homes[id(p)] > 1 for p in own)
        if not shared and sum(p.numel() for p in own) >= min(sizes):
            stays = False if isinstance(module, nn.Linear) else None
            found[module] = UnitRule(modules="auto", reshard_after_forward=stays)
    return found


def _around_graphs(root: nn.Module, chosen: dict[nn.Module, UnitRule]) -> dict[nn.Module, UnitRule]:
    """Replace modules inside a graph of the user's ``torch.compile`` by the module around it, because a unit's hooks
    break a graph. WrappingError: a module inside has settings of its own.
    """
    outside, below = set(outside_graphs(root)), _below(root)
    found = {module: rule for module, rule in chosen.items() if module in outside}
    for fqn, module in below.items():
        if (rule := chosen.get(module)) is None or module in outside:
            continue
        if rule.special:
            raise WrappingError(
                f"units gives {fqn} settings of its own, but it is inside a graph of torch.compile, which no unit "
                "splits. Leave torch.compile out and set compile: true, which compiles each unit."
            )
        above = fqn.rpartition(".")[0]
        while above and not (below[above] in outside and runs_forward(below[above])):
            above = above.rpartition(".")[0]
        if above:
            found.setdefault(below[above], rule)
    return found


def of_classes(root: nn.Module, names: Iterable[str], option: str) -> list[nn.Module]:
    """The modules of the named classes. WrappingError: ``option`` has a name that matches none."""
    names = set(names)
    _check_names(sorted(names), root.modules(), option)
    return [m for m in root.modules() if class_name(m) in names]


def _check_names(names: Iterable[str], modules: Iterable[nn.Module], option: str, having: str = "") -> None:
    present = Counter(map(class_name, modules))
    if missing := [n for n in names if n not in present]:
        listing = ", ".join(f"{name} (x{count})" for name, count in sorted(present.items())) or "none"
        raise WrappingError(
            f"{option} names {', '.join(map(repr, missing))}, but the model has no module of that class{having}. "
            f"Classes that are there: {listing}."
        )


def ignored_parameters(
    root: nn.Module, class_names: Iterable[str]
) -> tuple[list[nn.Module], Callable[[], dict[nn.Parameter, None]]]:
    """The modules of the named classes, and a function that reads the parameters that FSDP ignores: these modules',
    torchmetrics' (a metric's own network is not trained) and 0-d ones. A function, because materialization replaces
    parameters. It returns a dict's keys, so that all ranks reduce them in one order. WrappingError: a name matches
    nothing.
    """
    modules = of_classes(root, class_names, "ignored_modules")
    tops = [*modules, *(m for m in root.modules() if isinstance(m, Metric))]

    def read() -> dict[nn.Parameter, None]:
        named = {p for top in tops for p in top.parameters()}
        return dict.fromkeys(p for p in root.parameters() if p in named or p.ndim == 0)

    return modules, read


def _below(root: nn.Module) -> dict[str, nn.Module]:
    """All modules below ``root``, children first, each once, except metrics' own networks."""
    seen = {root}

    def walk(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for name, child in module.named_children():
            if child not in seen and not isinstance(child, Metric):
                seen.add(child)
                found |= {**walk(child, f"{prefix}{name}."), f"{prefix}{name}": child}
        return found

    return walk(root, "")


def runs_forward(module: nn.Module) -> bool:
    """Whether ``forward`` uses the module's parameters. False for containers and nn.MultiheadAttention's projection."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost containers that have at least two modules of one class."""
    if isinstance(module, Metric):
        return []
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        in_list = not isinstance(module, nn.Sequential)
        # A container may contain one module several times.
        children = [m for m in (module.values() if isinstance(module, nn.ModuleDict) else module) if m is not None]
        # Only modules with parameters, and not the single layers of an nn.Sequential.
        counts.update(type(m) for m in children if _has_parameters(m) and (in_list or [*m.children()]))
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if counts[type(child)] >= 2 and runs_forward(child) else _repeated_blocks(child)
    return found


def _by_pattern(root: nn.Module, pattern: str) -> list[nn.Module]:
    below = {fqn: m for fqn, m in _below(root).items() if _has_parameters(m) and runs_forward(m)}
    found = [m for fqn, m in below.items() if re.fullmatch(pattern, fqn)]
    if not found:
        raise WrappingError(
            f"units has the pattern {pattern!r}, but that is the whole name of no module with parameters and a forward "
            f"of its own. Modules that are there: {', '.join([*below][:20])}."
        )
    return found


def _by_size(root: nn.Module, smallest: int, taken: set[int]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for module in _below(root).values():
        # FSDP passes copies of inputs to a unit, and attention on copies of one tensor computes in another way.
        if not runs_forward(module) or isinstance(module, nn.MultiheadAttention):
            continue
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= smallest:
            taken.update(id(p) for p in free)
            found.append(module)
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _nearest_with_forward(module: nn.Module) -> list[nn.Module]:
    """The children of ``module``. A child without a forward is replaced by its children."""
    found: list[nn.Module] = []
    for child in module.children():
        found.extend([child] if runs_forward(child) else _nearest_with_forward(child))
    return found


def _drop_sharing_modules(root: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop modules until every parameter belongs to one unit, see `find_units`."""
    units = dict(modules)
    while True:
        dropped: set[str] = set()
        for homes in _homes(root, units).values():
            own = homes - {""} if len(homes) > 1 else set()
            inner = {fqn for fqn in own if any(o != fqn and units[fqn] in units[o].modules() for o in own)}
            dropped |= inner or own
        if not dropped:
            return units
        # The dropped modules' parameters move to the units around them, which may share them.
        units = {fqn: module for fqn, module in units.items() if fqn not in dropped}


def _homes(root: nn.Module, units: dict[str, nn.Module]) -> dict[nn.Parameter, set[str]]:
    """The innermost units ("": none) that contain each parameter, over all paths from ``root``."""
    names = {module: fqn for fqn, module in units.items()}
    home = {"": ""}  # By path.
    homes: dict[nn.Parameter, set[str]] = defaultdict(set)
    for path, module in root.named_modules(remove_duplicate=False):
        home[path] = names.get(module, home[path.rpartition(".")[0]])
        for parameter in module.parameters(recurse=False):
            homes[parameter].add(home[path])
    return homes
