"""What the package sets on objects by name, which classes it exchanges, and what of others' code it looks at.

Found are calls of ``setattr``, assignments to ``__class__``, uses of ``__code__``, ``sys._getframe``,
``inspect.currentframe`` and ``inspect.getsource``, and torch's modes that see every function or operator. Each function
that has one stands in the table with its reason, and has to leave it with the last of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent
MODES = ("TorchFunctionMode", "TorchDispatchMode")
LOOKS = ("__code__", "_getframe", "currentframe", "getsource")

# File, function or class ("" is the module's own level) and kind, to the reason.
FOUND = {
    ("_lightning/loops.py", "_count_ended_epochs", "setattr"): "counters of Lightning's progress, by their names",
    ("arguments.py", "checked_fields.decorate", "setattr"): "the constructor of a dataclass of this package",
    (
        "engines/materialize.py",
        "Materializer._replace_meta_tensors",
        "setattr",
    ): "a module's tensors in the place of those on meta",
    ("engines/materialize.py", "Materializer.fill", "setattr"): "a module's shards in the place of tensors on meta",
    ("engines/optimizer_probe.py", "copy_of", "setattr"): "values of a copied optimizer",
    ("engines/transforms.py", "_of_its_class", "__code__"): "a name of its own for each compiled class of units",
    ("engines/zero/running_engine.py", "_replace_norms_and_skips", "setattr"): "DeepSpeed's flag of an overflow",
    ("engines/zero/values.py", "partition_module", "setattr"): "buffers of a module, on the device",
    (
        "meters/flops.py",
        "NumbersReadAsOne",
        "TorchDispatchMode",
    ): "a step is counted on the meta device, which has no numbers",
    ("meters/flops.py", "NoAttentionDropout", "TorchFunctionMode"): "a step is counted as its fused kernels",
    ("meters/throughput_windows.py", "WaitClock.start_timing", "setattr"): "collectives of torch, which are timed",
    ("meters/throughput_windows.py", "WaitClock.stop_timing", "setattr"): "they are put back",
    ("planning/operators.py", "OperatorTimes", "TorchDispatchMode"): "operators of a traced step",
    ("precision/float8.py", "install_float8", "__class__"): "layers that compute in float8, as torchao makes them",
    ("engines/unsharding.py", "_remove_marks", "__class__"): "FSDP2 gave the module a class of its own",
    ("precision/float8.py", "_take_back", "__class__"): "they are put back",
    ("private_names.py", "wrap", "setattr"): "functions of DeepSpeed's engine, on the instance",
    ("private_names.py", "_codes", "__code__"): "which attributes a library's constructors set",
    ("resume/metrics.py", "_write", "setattr"): "states of metrics",
    ("resume/metrics.py", "_write_extra", "setattr"): "values of metrics that are no states",
    ("resume/shape.py", "Delegating.__setattr__", "setattr"): "an attribute of the loader that is wrapped",
    (
        "run/full_tensors.py",
        "load_from_checkpoint",
        "__class__",
    ): "the class of a module that Lightning has built by a subclass",
    ("strategies/refusals.py", "refuse_loss", "__code__"): "file and line of a training_step, in an error",
    ("tensors/fake.py", "_FakeInputs", "TorchDispatchMode"): "tensors that a traced step makes",
    ("tensors/names.py", "replace_tensors", "setattr"): "other tensors in a module, for a call",
    ("tensors/names.py", "replace_tensors.restore", "setattr"): "they are put back",
    ("tensors/tracing.py", "", "TorchDispatchMode"): "its name in torch, for all modules",
    ("engines/transforms.py", "_Expensive", "TorchDispatchMode"): "what selective checkpointing saves",
}


def _names(target: ast.expr) -> Iterator[str]:
    """The attributes that an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _names(each)
    elif isinstance(target, ast.Attribute):
        yield target.attr


def kinds_of(node: ast.AST) -> Iterator[str]:
    """What a node is of the things that are looked for, if any."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        yield "setattr"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any("__class__" in _names(target) for target in targets):
            yield "__class__"
    elif isinstance(node, ast.Attribute) and node.attr in (*LOOKS, *MODES):
        yield node.attr
    elif isinstance(node, ast.Name) and node.id in (*LOOKS, *MODES) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Constant) and node.value in ("__class__", "__code__", *MODES):
        yield str(node.value)


def interceptions(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, str]]:
    """Function or class, and kind, of each that is below a node; annotations are left out."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                inner = scope
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = f"{scope}.{node.name}" if scope else node.name
                yield from ((inner, kind) for kind in kinds_of(node))
                yield from interceptions(node, inner)


def test_what_is_left_stands_in_the_table() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), *each)
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in interceptions(ast.parse(path.read_text()))
    }
    assert sorted(found - FOUND.keys()) == [], "write it in another way, or give the reason"
    assert sorted(FOUND.keys() - found) == [], "not there any more"


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("def f():\n    setattr(a, 'b', 1)", [("f", "setattr")]),
        ("class A:\n    def f(self):\n        a.__class__ = B", [("A.f", "__class__")]),
        ("setattr(a, '__class__', B)", [("", "setattr"), ("", "__class__")]),
        ("import sys\nsys._getframe(1)", [("", "_getframe")]),
        ("class M(TorchDispatchMode): ...", [("M", "TorchDispatchMode")]),
        ("def f(mode: TorchDispatchMode) -> str:\n    return type(mode.__class__).__name__", []),
    ],
)
def test_each_kind_is_found(source: str, kinds: list[tuple[str, str]]) -> None:
    assert list(interceptions(ast.parse(source))) == kinds
