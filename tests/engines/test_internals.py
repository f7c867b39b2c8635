"""All that fits use of FSDP2's and DeepSpeed's internals is required, by the class that has it, and as assigned."""

from __future__ import annotations

import ast
import dis
import enum
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed import fsdp

import lightning_shard
from lightning_shard import full_tensor, set_full_tensor
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.engines import ENGINES
from tests.strategies.indexed import data
from tests.strategies.test_used_in_turn import InTurn

PACKAGE = Path(lightning_shard.__file__).parent
SOURCES = [PACKAGE / "engines/_fsdp2.py", PACKAGE / "engines/_fsdp2_before_2_15.py", *PACKAGE.glob("engines/zero/*.py")]
INTERNAL = ("torch.distributed.fsdp._fully_shard", "deepspeed")

# Names that need not be required, by owner, and why.
EXCEPTED = {
    "deepspeed": ("documented", "DeepSpeedEngine init_distributed initialize zero __version__"),
    "zero": ("documented", "Init"),
    "DeepSpeedEngine": ("documented, and set through the instance's dict", "module"),
    "accelerator": ("documented", "get_accelerator set_accelerator"),
    "DeepSpeedAccelerator": ("documented", "current_device device_name resolves_data_dependency synchronize"),
    "CPU": ("this package's own", "chosen_here"),
    "DeepSpeedZeroConfig": ("documented", "stage"),
    "Section": ("pydantic's, documented", "model_dump"),
    "config": ("held by test_keys.py", "CSVConfig CometConfig TensorBoardConfig WandbConfig"),
    "precision_config": ("held by test_keys.py", "DeepSpeedBF16Config DeepSpeedFP16Config"),
}

# Tensors have what `deepspeed.zero.Init` gives them.
GIVEN_BY = {"Tensor": "Init"}

Use = tuple[tuple[str, ...], str, bool]
"""Names of a class and its bases, or of a module; the attribute; whether it is assigned."""


@contextmanager
def recorded() -> Generator[set[Use]]:
    """The attributes of internal objects that code of the package reads and assigns meanwhile."""
    found: set[Use] = set()

    def note(owner: Any, name: str, *, assigned: bool) -> None:
        frame = sys._getframe(2)
        if not frame.f_code.co_filename.startswith(str(PACKAGE)) or name.startswith("__"):
            return
        if isinstance(owner, ModuleType):
            if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "IMPORT_FROM":  # Python tells of these itself.
                found.add(((owner.__name__.rpartition(".")[2],), name, assigned))
        elif not isinstance(owner, torch.Tensor) or not hasattr(type(owner), name):
            found.add((tuple(cls.__name__ for cls in type(owner).__mro__), name, assigned))

    def watched(cls: type) -> dict[str, Callable[..., Any]]:
        read, assign = cls.__getattribute__, cls.__setattr__
        return {
            "__getattribute__": lambda self, name: (read(self, name), note(self, name, assigned=False))[0],
            "__setattr__": lambda self, name, value: (assign(self, name, value), note(self, name, assigned=True))[0],
        }

    modules = [each for name, each in sys.modules.items() if name.startswith(INTERNAL) and type(each) is ModuleType]
    own = [(cls, {name: vars(cls).get(name) for name in watched(cls)}) for cls in _internal_classes(modules)]
    for cls, _ in own:
        for name, function in watched(cls).items():
            setattr(cls, name, function)
    kind = type("Watched", (ModuleType,), watched(ModuleType))
    for module in modules:
        module.__class__ = kind
    try:
        yield found
    finally:
        for module in modules:
            module.__class__ = ModuleType
        for cls, functions in own:
            for name, function in functions.items():
                if function is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, function)


def _internal_classes(modules: list[ModuleType]) -> list[type]:
    """Classes that ``modules`` define and torch.distributed.fsdp does not export, without those that derive from others
    of them, and torch's tensors, which DeepSpeed gives attributes to.
    """
    defined = {c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__}
    inside = {c for c in defined if vars(fsdp).get(c.__name__) is not c}
    kept = {c for c in inside if not issubclass(c, enum.Enum | BaseException | torch.Tensor)}
    return [torch.Tensor, *(cls for cls in kept if kept.isdisjoint(cls.__mro__[1:]))]


class Writes(pl.Callback):
    """Reads and writes between steps."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        full_tensor(trainer, "shift", "gradient")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        set_full_tensor(trainer, "shift", full_tensor(trainer, "shift"))


class Two(TinyLM):
    """Steps two optimizers by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.blocks.parameters()), torch.optim.AdamW([*self.embed.parameters(), self.shift])]


def used_by_fits(engines: list[str]) -> set[Use]:
    import deepspeed  # noqa: F401

    with recorded() as found:
        for engine in engines:
            flags: dict[str, Any] = {"max_steps": 2, "callbacks": [Writes()]}
            build, twice = ENGINES[engine], {"max_epochs": 1, "accumulate_grad_batches": 2}
            for module, precision in ((TinyLM(tie=True), "bf16-mixed"), (Two(), "32-true")):
                quiet_trainer(strategy=build(), precision=precision, **flags).fit(module, loader(), loader(count=8))
            if engine.startswith("zero"):
                quiet_trainer(strategy=build(aligned=True), precision="bf16-mixed", **twice).fit(TinyLM(), loader())
            else:
                quiet_trainer(strategy=build(accumulate_sync="boundary"), **twice).fit(InTurn(), data())
    return found


def _asking() -> Iterator[tuple[ast.Module, list[ast.Call]]]:
    """Each source with its calls of ``require``."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        yield tree, [call for call in calls if ast.unparse(call.func) == "require"]


def required() -> dict[tuple[str, str], bool]:
    """Owner and name to whether it is required as one that is assigned."""
    found = {}
    for tree, calls in _asking():
        # An alias is an owner's other name.
        aliases = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in ast.walk(tree) if isinstance(n, ast.Assign)}
        for call in calls:
            given = ast.unparse(call.args[0])
            owner = aliases.get(given, given).rpartition(".")[2]
            for assigned, names in [(False, n) for n in call.args[1:]] + [(True, k.value) for k in call.keywords]:
                for name in ast.literal_eval(names).split():
                    found[owner, name] = assigned or found.get((owner, name), False)
    return found


def lacking(found: set[Use]) -> list[str]:
    """What is used and not required."""
    known = required() | {(owner, name): False for owner, (_, names) in EXCEPTED.items() for name in names.split()}
    return [
        f"{owners[0]}.{name}{' =' if assigned else ''}"
        for owners, name, assigned in sorted(found)
        if not any(known.get((GIVEN_BY.get(o, o), name), None) in (True, assigned) for o in owners)
    ]


@pytest.mark.parametrize(
    "engines",
    sampled([["full"], ["zero_2", "zero_3"], ["grad_op", "zero_1", "zero_2_offload", "zero_3_offload"]], 0),
)
def test_all_that_fits_use_of_internals_is_required(engines: list[str]) -> None:
    for found in run_distributed(used_by_fits, 2, engines, timeout=300):
        assert {name for _, name, _ in found} & {"fsdp_params", "basic_optimizer"}
        assert lacking(found) == [], "private_names.require them of this owner, with assigned= where they are assigned"


def test_all_that_is_required_is_used() -> None:
    used = set()
    for tree, calls in _asking():
        asked = {id(word) for call in calls for word in ast.walk(call)}
        nodes = [node for node in ast.walk(tree) if id(node) not in asked]
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        used |= {node.name for node in nodes if isinstance(node, ast.alias)}
    assert {name for _, name in required()} - used == set()
