"""Checkpoints in Hugging Face's layout: a folder that ``from_pretrained`` opens, written from training on any engine.

The library itself names the files and the tensors in them: one rank calls its ``save_pretrained`` with a number for
each tensor. The values come from a portable directory of the weights, which ranks write without gathering. The ranks
divide the files, and each holds one full tensor at a time. torch's ``HuggingFaceStorageWriter`` would hold all tensors
of a file. Exported weights are safetensors files with an index (https://github.com/huggingface/safetensors#format).
"""

import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import Contents, Manifest, StoredTensor, library_versions, raw_bytes
from lightning_shard.checkpoint.files.tensor_files import HashedFile, write_file
from lightning_shard.checkpoint.foreign.pretrained_weights import INDEX, SINGLE
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import class_name, fqns, unwrapped_modules
from lightning_shard.text import listed

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def export(
    stored: Contents,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    module: str = "",
    max_shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write the weights and buffers of ``stored`` into ``folder`` and return the files. One process calls it.

    Arguments as of `lightning_shard.tools.export`. Other files in ``folder`` stay, older safetensors files are refused.
    A tied tensor is written once, under its first name. CheckpointError: no file stays behind.
    """
    target = Path(folder)
    tensors = _selected(stored, module)
    if unknown := sorted({layout.dtype_name(t.dtype) for t in tensors.values() if t.dtype not in DTYPES}):
        raise CheckpointError(f"safetensors has no dtype for {', '.join(unknown)}")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; safetensors files are exported into a directory")
    if older := sorted(path.name for path in target.glob("*.safetensors*")) if target.is_dir() else []:
        raise CheckpointError(f"{target} has {listed(older)} of an earlier export: choose an empty directory")
    if dtype is not None:
        tensors = {key: _converted(t, dtype) if t.dtype.is_floating_point else t for key, t in tensors.items()}
    files = split(tensors, max_shard_bytes)
    index = index_of(files)
    written, is_new = [target / name for name in (*files, *index)], not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        for name, chosen in files.items():
            _write_in_place(target, name, partial(write_tensors, tensors=chosen))
        for name, data in index.items():  # last: without it no reader takes the files for complete
            _write_in_place(target, name, partial(write_file, data=data))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        if is_new:
            target.rmdir()
        raise
    return written


def _selected(stored: Contents, module: str) -> dict[str, StoredTensor]:
    """Return name in the submodule to tensor, each tensor once."""
    prefix = f"{layout.MODEL_PREFIX}{module}." if module else layout.MODEL_PREFIX
    chosen: dict[str, StoredTensor] = {}
    seen: set[int] = set()
    for key in [*sorted(stored.tensors), *sorted(stored.aliases)]:
        tensor = stored.tensors[stored.aliases.get(key, key)]
        if key.startswith(prefix) and id(tensor) not in seen:
            seen.add(id(tensor))
            chosen[key.removeprefix(prefix)] = tensor
    if not chosen:
        tops = sorted({fqn.split(".")[0] for fqn in layout.without_prefix(layout.MODEL_PREFIX, stored.tensors)})
        raise CheckpointMismatchError(f"there is no tensor of {module!r}; the module has {', '.join(tops)}")
    return chosen


def _converted(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(shape=tensor.shape, dtype=dtype, read=lambda: tensor.read().to(dtype))


def split(tensors: Mapping[str, StoredTensor], most_bytes: int) -> dict[str, dict[str, StoredTensor]]:
    """Divide tensors into safetensors files of at most ``most_bytes``, or of one tensor. Returned: by file name."""
    shards: list[dict[str, StoredTensor]] = [{}]
    used = 0
    for key, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > most_bytes:
            shards.append({})
            used = 0
        shards[-1][key] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def index_of(files: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, bytes]:
    """Return name and contents of the index of the ``files`` of `split`. One file has none."""
    if len(files) == 1:
        return {}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def write_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> FileEntry:
    """Write a safetensors file, synced, one tensor at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(raw_bytes(tensor.read()))
    return stream.entry()


def _write_in_place(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = layout.temporary_sibling(folder / name, layout.new_token())
    with commit.deleted_on_failure(temporary):
        write(temporary)
        os.replace(temporary, folder / name)
    commit.sync_directory(folder)


_MODELS = {"PreTrainedModel", "PeftModel"}
_PROCESSORS = {"PreTrainedTokenizerBase", "ProcessorMixin", "ImageProcessingMixin", "FeatureExtractionMixin"}
_MOST_BYTES = 5 * 10**9  # of tensors in a file
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The folder without the tensors' values."""

    files: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, str]]  # name of each safetensors file to its keys and their FQNs

    def part_of(self, contents: Contents) -> Contents:
        """Select the folder's weights from a save, or their averages if there are any."""
        contents = contents.averaged() if contents.has_averages else contents
        keys = {layout.MODEL_PREFIX + fqn for names in self.tensors.values() for fqn in names.values()}
        if lost := sorted(keys - contents.tensors.keys()):
            raise CheckpointError(f"on_save_checkpoint left out {listed(lost)}, which from_pretrained needs")
        weights = {key: tensor for key, tensor in contents.tensors.items() if key in keys}
        return replace(contents, tensors=weights, aliases={}, slots={}, trainer_state={})


def _pretrained_model(module: nn.Module) -> tuple[str, nn.Module]:
    """Find the one model of transformers or PEFT in ``module``. Returned: its FQN and the model."""
    found: dict[str, nn.Module] = {}
    for name, part in unwrapped_modules(module):
        if _is_one_of(part, _MODELS) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = part
    problem = f"{class_name(module)} has {', '.join(sorted(found)) or 'no model'} of transformers or PEFT"
    if len(found) == 1:
        (name, model) = found.popitem()
        adapters: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
        if not any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
            if len(adapters) < 2:
                return name, model
            problem = f"{name} has the adapters {', '.join(adapters)}"
        else:
            problem = f"{name} has prompts, which PEFT computes"
    raise CheckpointError(
        f"the name of a checkpoint ends in .hf, but {problem}, and such a checkpoint is one model or one adapter's "
        "parameters. Save without .hf, and use lightning-shard checkpoint export --module NAME."
    )


def _is_one_of(thing: Any, classes: Collection[str]) -> bool:
    """``isinstance`` by names of classes, which need not be imported."""
    return any(kind.__name__ in classes for kind in type(thing).__mro__)


def make_skeleton(module: nn.Module, owners: Collection[Any]) -> Skeleton:
    """Make the skeleton of the model in ``module`` and its tokenizer or processor. One rank calls it.

    The tokenizer is an attribute of one of ``owners``, or is loaded from the model's ``name_or_path``. CheckpointError:
    no model or several, several adapters, or prompts.
    """
    from safetensors.torch import load_file

    name, model = _pretrained_model(module)
    prefix = f"{name}." if name else ""
    names = fqns(module)
    order = list(names.tensors)
    number = {fqn: torch.tensor([i]) for i, fqn in enumerate(order)}
    own = {**number, **{alias: number[fqn] for alias, fqn in names.aliases.items()}}
    given = {fqn.removeprefix(prefix): value for fqn, value in own.items() if fqn.startswith(prefix)}
    files: dict[str, bytes] = {}
    tensors: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=given, save_original_format=False)  # type: ignore[operator]
        for processor in _processors(model, owners):
            processor.save_pretrained(folder)
        for file in (path for path in sorted(Path(folder).rglob("*")) if path.is_file()):
            # PEFT writes an adapter that is not named "default" into a folder of its name.
            base = file.parent if (file.parent / "adapter_config.json").exists() else folder
            name = file.relative_to(base).as_posix()
            if file.suffix == ".safetensors":
                tensors[name] = {key: order[int(value)] for key, value in load_file(file).items()}
            else:
                files[name] = file.read_bytes()
    return Skeleton(files=files, tensors=tensors)


def _processors(model: Any, owners: Collection[Any]) -> list[Any]:
    attributes = [thing for owner in owners for thing in vars(owner).values()]
    if found := [thing for thing in attributes if _is_one_of(thing, _PROCESSORS)]:
        return found
    from transformers import AutoTokenizer

    source = getattr(getattr(model, "config", None), "name_or_path", None)
    try:
        return [AutoTokenizer.from_pretrained(source, local_files_only=True)] if source else []
    except Exception:  # some models have none
        return []


def write_hugging_face(ranks: Ranks, target: Path, parts: Path, skeleton: Skeleton) -> None:
    """Write the folder ``target`` atomically from the directory ``parts``, and delete that. All ranks call it."""
    token = layout.new_token()

    def complete() -> None:
        files = {name: entry for entries in written for name, entry in entries.items()}
        facts = replace(open_portable(parts, compared=False).facts, world_size=ranks.size, versions=library_versions())
        manifest = Manifest(facts=facts, tensors={}, aliases={}, slots={}, files=files)
        write_file(temporary / layout.MANIFEST, manifest.to_json().encode())
        commit.publish_checkpoint(temporary, target, token)

    try:
        # The token is rank 0's.
        temporary = cast(Path, ranks.first(f"writing {target}", lambda: commit.create_temporary(target, token)))
        with commit.deleted_on_failure(temporary, here=ranks.is_first):
            written = ranks.collect(f"writing {target}", lambda: _write_share(ranks, temporary, parts, skeleton))
            ranks.first(f"completing {target}", complete)
    finally:
        if ranks.is_first:
            commit.delete_tree(parts)  # also if it is still being read


def _write_share(ranks: Ranks, temporary: Path, parts: Path, skeleton: Skeleton) -> dict[str, FileEntry]:
    """Write this rank's share of the files with tensors, and on rank 0 all others."""
    stored = open_portable(parts, compared=False)  # written a moment ago, and each rank reads only parts of files
    entries: dict[str, FileEntry] = {}
    for whole, keys in skeleton.tensors.items():
        tensors = {key: stored.tensors[layout.MODEL_PREFIX + fqn] for key, fqn in keys.items()}
        files = split(tensors, _MOST_BYTES) if whole == SINGLE else {whole: tensors}
        for name in list(files)[ranks.rank :: ranks.size]:
            entries[name] = write_tensors(temporary / name, files[name])
        if ranks.is_first:
            dtypes = [tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point]
            other = {**skeleton.files, **index_of(files)}
            if _CONFIG in other and dtypes:  # the module's dtype may differ from the master weights'
                config = {**json.loads(other[_CONFIG]), "dtype": layout.dtype_name(max(dtypes, key=dtypes.count))}
                other[_CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
            for name, data in other.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                entries[name] = write_file(temporary / name, data)
    return entries
