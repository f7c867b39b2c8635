"""Private names of other libraries: which modules use which, why, and that each is required on import.

A use is an attribute with a leading underscore of anything but ``self``, ``cls`` and ``super()``, such a name given to
``getattr``, ``setattr``, ``hasattr``, ``delattr`` or ``replace``, or an import from a private module or of a private
name. What an object of this package keeps for itself is not read from outside, so that all uses are of others' names.
"""

from __future__ import annotations

import argparse
import ast
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_shard
from lightning_shard.private_names import require
from lightning_shard.versions import TESTED

PACKAGE = Path(lightning_shard.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

# Modules, why they need them, and all the private names that they use.
USES = {
    "_lightning/callbacks.py": (
        "what a run resumes from, links, saves that wait, the summary under ZeRO-3",
        "_checkpoint_connector _every_n_train_steps _link_checkpoint _max_depth _summary",
    ),
    "_lightning/loaders.py": (
        "the loaders' loaded states and samplers, a fit's way back to a checkpoint",
        "_checkpoint_connector _combined_loader _data_connector _data_source _last_train_dl_reload_epoch _mode"
        " _resolve_sampler",
    ),
    "_lightning/loops.py": (
        "whether a fit restarts, whether validation is due; signal handlers, the end of a run",
        "_broadcast_sigterm_tensor _checkpoint_connector _combined_loader_states_to_load _current_fx_name"
        " _data_fetcher _has_run _last_val_time _loaded_checkpoint _restarting _should_check_val_fx _signal_connector"
        " _skip_next_val",
    ),
    "_lightning/processes.py": (
        "launchers, the process group, the module's device",
        "_MultiProcessingLauncher _SubprocessScriptLauncher _device_mesh _update_properties",
    ),
    "_lightning/results.py": ("logged values across a resume", "_results"),
    "callbacks/profiler.py": ("documented under these names", "_dump_snapshot _record_memory_history"),
    "checkpoint/files/boxes.py": ("records of torch's checkpoints", "_StorageInfo"),
    "cluster/traces.py": ("what a rank that hangs is in", "_C _current_frames _distributed_c10d"),
    "commands/options.py": ("the arguments of a parser", "_actions"),
    "engines/torch_ddp.py": (
        "DistributedDataParallel's reducer",
        "_autograd_hook _check_reducer_finalized _rebuild_buckets _remove_autograd_hooks",
    ),
    "engines/dtensor_refusals.py": (
        "operators of DTensors that torch asks of each shard",
        "_custom_op_handlers _op_dispatcher",
    ),
    "engines/_fsdp2.py": (
        "the parameters of FSDP2's units",
        "_fsdp_param_group _fsdp_state _fully_shard _modules_to_run_forward _mp_policy"
        " _post_forward_hook_handle _pre_forward_hook_handle _register_post_backward_hook _register_pre_backward_hook"
        " _sharded_post_forward_param _state_ctx _training_state",
    ),
    "engines/fully_shard.py": ("torch's mark of sharded modules, which Hugging Face's read", "_is_fsdp_managed_module"),
    "engines/materialize.py": ("a convention of Hugging Face's models", "_init_weights"),
    "engines/unsharding.py": (
        "a dict of parameters that an engine has replaced, the modules that FSDP2 takes for sharded",
        "_composable_state _module_state_mapping _parameters",
    ),
    "engines/units.py": ("a convention of Hugging Face's models", "_no_split_modules"),
    "engines/zero/kernels.py": ("kernels that are loaded", "_loaded_ops"),
    "engines/zero/flat_layout.py": (
        "gradients of micro-batches so far",
        "_use_compact_grad_partition_buffer",
    ),
    "engines/zero/values.py": ("partitioning", "_convert_to_deepspeed_param"),
    "engines/zero/connection.py": (
        "groups of an earlier process group, what DeepSpeed broadcasts",
        "_broadcast_model _get_zero_param_intra_parallel_group _release_process_group_references",
    ),
    "engines/zero/running_engine.py": (
        "backward and refresh",
        "_backward_epilogue _backward_prologue _backward_prologue_per_tensor _running_engine_backward"
        " _reassign_or_swap_out_partitioned_parameters",
    ),
    "engines/zero/saved_weights.py": (
        "hooks on saved tensors, writes to tensors",
        "_C _autograd _base _top_saved_tensors_default_hooks",
    ),
    "engines/zero/swapping.py": (
        "optimizer state in files",
        "_get_param_swap_info _offload_grad_partition_at_boundary _prepare_sub_group",
    ),
    "meters/throughput_windows.py": ("the end of a rank's own backward pass", "_execution_engine"),
    "precision/casting.py": (
        "whether a backward pass runs; a named tuple's documented method",
        "_C _current_graph_task_id _make",
    ),
    "resume/metrics.py": (
        "torchmetrics' counters and caches",
        "_cache _is_synced _num_vals_seen _reduce_states _update_count",
    ),
    "run/preemption_save.py": ("os._exit is documented", "_exit"),
    "tensors/clipping.py": ("the norms of many gradients in one kernel", "_foreach_norm"),
    "tensors/fake.py": ("fake tensors", "_subclasses"),
    "tensors/names.py": (
        "buffers that no state_dict has, what was compiled",
        "_compiled_call_impl _non_persistent_buffers_set _torchdynamo_orig_callable",
    ),
    "tensors/tracing.py": (
        "modes that follow operators, what these are, and how often a tensor was written to",
        "_python_dispatch _pytree _schema _version",
    ),
}

# Names that are used where they are there, or that no `require` can ask for.
NOT_REQUIRED = {
    "_current_frames": "documented",
    "_exit": "documented",
    "_init_weights": "Hugging Face's models have it, others need not",
    "_is_fsdp_managed_module": "read by dynamo and others where it is there",
    "_make": "documented; named tuples have it",
    "_no_split_modules": "Hugging Face's models have it, others need not",
    "_schema": "higher-order operators have none",
    "_torchdynamo_orig_callable": "compiled functions have it",
}

_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "replace", "restore", "wrap"}


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore or two, and is neither ``_`` nor like ``__init__``."""
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The private parts of what is imported from another package: modules and names."""
    for alias in node.names:
        path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        if path.split(".")[0] not in ("lightning_shard", "__future__"):
            yield from filter(is_private, path.split("."))


def uses(source: str) -> Iterator[str]:
    """The private names of others that a module uses, each as often as it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _BY_NAME:
            given = node.args[1] if len(node.args) > 1 else None
            if isinstance(given, ast.Constant) and isinstance(given.value, str) and is_private(given.value):
                yield given.value
        elif isinstance(node, ast.Dict):  # a table, of which a row begins with an attribute's name
            rows = [row.elts[0] for row in node.values if isinstance(row, ast.Tuple) and row.elts]
            names = [name.value for name in rows if isinstance(name, ast.Constant) and isinstance(name.value, str)]
            yield from (name for name in names if name.isidentifier() and is_private(name))


def required(source: str) -> set[str]:
    """The names in a module's calls of ``require``, and in the table of `_lightning`."""
    asking = [
        node
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "require")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_REQUIRED")
    ]
    words = [word.value for node in asking for word in ast.walk(node) if isinstance(word, ast.Constant)]
    return {name for word in words if isinstance(word, str) for name in word.split() if is_private(name)}


def test_private_names_are_those_of_the_table() -> None:
    found = {module: set(uses(source)) for module, source in SOURCES.items()}
    listed = {module: set(names.split()) for module, (_, names) in USES.items()}
    assert {module: names for module, names in found.items() if names} == listed, "use a public name, or list it"


def test_the_tables_have_no_dead_entries() -> None:
    assert {*NOT_REQUIRED} - {name for _, names in USES.values() for name in names.split()} == set()


# Names of the table that are neither torch's nor Lightning's.
_OTHERS = {
    *("_actions", "_current_frames", "_exit", "_make"),  # Python's
    *("_init_weights", "_no_split_modules"),  # Hugging Face's
    *("_cache", "_is_synced", "_num_vals_seen", "_reduce_states", "_update_count"),  # torchmetrics'
}


def test_few_private_names_are_used() -> None:
    names = {name for module, (_, listed) in USES.items() if "/zero/" not in module for name in listed.split()}
    assert len(names - _OTHERS) <= 65, "look for a public way"


def test_lightnings_and_deepspeeds_private_names_have_a_home() -> None:
    for module, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            library = (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else ""
            if library in ("lightning", "deepspeed") and list(imported(node)):  # type: ignore[arg-type]
                home = {"lightning": "_lightning/", "deepspeed": "engines/zero/"}[library]
                assert module.startswith(home), f"line {node.lineno}: {library}'s private names lie in {home}"  # type: ignore[attr-defined]


def test_attributes_are_required_on_import() -> None:
    asked = {name: required(source) for name, source in SOURCES.items()}
    lacking = {}
    for module, (_, names) in USES.items():
        folder = next((home for home in ("_lightning/", "engines/zero/") if module.startswith(home)), module)
        here = set().union(*(found for name, found in asked.items() if name.startswith(folder)))
        nodes = [n for n in ast.walk(ast.parse(SOURCES[module])) if isinstance(n, ast.Import | ast.ImportFrom)]
        checked_by_python = {name for node in nodes for name in imported(node)}
        if missing := set(names.split()) - here - checked_by_python - {*NOT_REQUIRED}:
            lacking[module] = missing
    assert lacking == {}, "private_names.require them, so that a version without them is told on import"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(trainer): return trainer._checkpoint_connector", ["_checkpoint_connector"]),
        ("self._own = self.engine._step()", ["_step"]),
        ("getattr(x, '_ready', None)", ["_ready"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from lightning.pytorch.loops import _Loop as Loop", ["_Loop"]),
        ("from lightning_shard import _lightning\nfrom __future__ import annotations", []),
        ("type(x).__mro__, x.__dict__, self.x._", []),
    ],
)
def test_a_use_is_found(source: str, found: list[str]) -> None:
    assert list(uses(source)) == found


def test_a_name_that_vanished_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "tests", ("0.1", "0.2"))

    def plain(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: method(*args)

    class Library:
        _declared: int

        def __init__(self) -> None:
            self._set_here = 1

        @plain
        def _method(self, other: Any) -> None:
            other.on_another = 1

    names = "_declared _set_here _method on_another"
    require(Library, names, assigned=names)
    with pytest.raises(ImportError, match=r"Library has no gone, which .* tested on: tests 0\.1 to 0\.2"):
        require(Library, "_method gone")
    with pytest.raises(ImportError, match=r"Library has no gone, which"):
        require(Library, assigned="_method gone")
    with pytest.raises(ImportError, match="_pytree"):
        require(types.ModuleType("torch.utils"), "_pytree")
    with pytest.raises(ImportError, match=r"argparse has no gone, .* python 3\.11 to 3\."):
        require(argparse, "gone")
    module = types.ModuleType(__name__)
    vars(module).update(Library=Library, Path=Path)
    require(module, "_declared _set_here _method")
    with pytest.raises(ImportError, match="has no _gone, glob,"):
        require(module, "_method _gone glob")
