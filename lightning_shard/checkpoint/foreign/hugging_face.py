"""Checkpoints in Hugging Face's layout: a folder that ``from_pretrained`` opens, written from training on any engine.

Which files there are and how tensors are called in them is the library's own answer: on one rank its
``save_pretrained`` is given a number in the place of each tensor. The values come from a portable directory of the
weights alone, which the ranks write without gathering and then share out, file by file; a rank has one full tensor at a
time.
"""

import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.contents import Contents
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.manifest import Manifest, library_versions
from lightning_shard.checkpoint.files.safetensors import SINGLE
from lightning_shard.checkpoint.files.tensor_files import write_file
from lightning_shard.checkpoint.foreign.export import index_of, split, write_tensors
from lightning_shard.checkpoint.load import open_portable
from lightning_shard.errors import CheckpointError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.names import fqns, unwrapped_modules

_MODELS = {"PreTrainedModel", "PeftModel"}
_PROCESSORS = {"PreTrainedTokenizerBase", "ProcessorMixin", "ImageProcessingMixin", "FeatureExtractionMixin"}
_MOST_BYTES = 5 * 10**9  # of tensors in a file
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """The folder without the tensors' values."""

    files: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, str]]  # Name of each safetensors file to its keys, and the FQN of each.

    def part_of(self, contents: Contents) -> Contents:
        """The weights that are to be written, averages where there are some, and nothing else of a save."""
        contents = contents.averaged() if contents.has_averages else contents
        keys = {layout.model_key(fqn) for names in self.tensors.values() for fqn in names.values()}
        if lost := sorted(keys - contents.tensors.keys()):
            raise CheckpointError(f"on_save_checkpoint left out {', '.join(lost[:5])}, which from_pretrained needs")
        weights = {key: tensor for key, tensor in contents.tensors.items() if key in keys}
        return replace(contents, tensors=weights, aliases={}, slots={}, trainer_state={})


def _pretrained_model(module: nn.Module) -> tuple[str, nn.Module]:
    """FQN of the one model of transformers or PEFT that ``module`` has or is, and the model."""
    found: dict[str, nn.Module] = {}
    for name, part in unwrapped_modules(module):
        if _is_one_of(part, _MODELS) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = part
    if len(found) != 1:
        raise CheckpointError(
            f"the name of a checkpoint ends in .hf, but {type(module).__name__} has "
            f"{', '.join(sorted(found)) or 'no model'} of transformers or PEFT, and such a checkpoint is one model. "
            "Save without .hf, and use lightning-shard checkpoint export --module NAME."
        )
    (name, model) = found.popitem()
    adapters: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    computed = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values())
    if computed or len(adapters) > 1:
        raise CheckpointError(
            f"the name of a checkpoint ends in .hf, but {name} has "
            f"{'prompts, which PEFT computes' if computed else 'the adapters ' + ', '.join(adapters)}, and such a "
            "checkpoint has parameters of one adapter. Save without .hf."
        )
    return name, model


def _is_one_of(thing: Any, classes: Collection[str]) -> bool:
    """Whether it is of one of these classes, which need not be imported."""
    return any(kind.__name__ in classes for kind in type(thing).__mro__)


def skeleton(module: nn.Module, owners: Collection[Any]) -> Skeleton:
    """What is written of the model that ``module`` has, and the tokenizer. One rank calls it.

    The tokenizer, or processor, is an attribute of one of ``owners``, or lies where the model's configuration is from.
    CheckpointError for a module that has no model or several, and for several adapters or prompts.
    """
    name, model = _pretrained_model(module)
    prefix = f"{name}." if name else ""
    names = fqns(module)
    order = list(names.tensors)
    number = {fqn: torch.tensor([i]) for i, fqn in enumerate(order)}
    own = {**number, **{alias: number[fqn] for alias, fqn in names.aliases.items()}}
    given = {fqn.removeprefix(prefix): value for fqn, value in own.items() if fqn.startswith(prefix)}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=given, save_original_format=False)  # type: ignore[operator]
        for processor in _processors(model, owners):
            processor.save_pretrained(folder)
        return _read(Path(folder), order)


def _processors(model: Any, owners: Collection[Any]) -> list[Any]:
    attributes = [thing for owner in owners for thing in vars(owner).values()]
    if found := [thing for thing in attributes if _is_one_of(thing, _PROCESSORS)]:
        return found
    from transformers import AutoTokenizer

    source = getattr(getattr(model, "config", None), "name_or_path", None)
    try:
        return [AutoTokenizer.from_pretrained(source, local_files_only=True)] if source else []
    except Exception:  # there are models without one
        return []


def _read(folder: Path, order: list[str]) -> Skeleton:
    from safetensors.torch import load_file

    files: dict[str, bytes] = {}
    tensors: dict[str, dict[str, str]] = {}
    # An adapter of another name than "default" lies in a folder of that name.
    for file in (path for path in sorted(folder.rglob("*")) if path.is_file()):
        if file.suffix != ".safetensors":
            files[file.name] = file.read_bytes()
            continue
        numbers = load_file(file)
        tensors[file.name] = {key: order[int(value)] for key, value in numbers.items()}
    return Skeleton(files=files, tensors=tensors)


def write_hugging_face(ranks: Ranks, target: Path, parts: Path, wanted: Skeleton) -> None:
    """Write the folder ``target`` from the portable directory ``parts`` and remove that. All ranks call it.

    It appears at once, with a manifest of its files. Raises the same CheckpointError on every rank.
    """
    token = layout.new_token()
    temporary = layout.temporary_sibling(target, token)
    try:
        with commit.deleted_on_failure(temporary, here=ranks.is_first):
            ranks.first(f"writing {target}", lambda: commit.begin(target, token))
            written = ranks.collect(f"writing {target}", lambda: _write_share(ranks, temporary, parts, wanted))
            ranks.first(f"completing {target}", lambda: _complete(temporary, target, token, parts, wanted, written))
    finally:
        if ranks.is_first:
            commit.remove(parts)


def _write_share(ranks: Ranks, temporary: Path, parts: Path, wanted: Skeleton) -> dict[str, FileEntry]:
    """Write every so many-th file; rank 0 those without tensors too."""
    stored = open_portable(parts, compared=False)  # It was written a moment ago, and each rank reads a part of a file.
    entries: dict[str, FileEntry] = {}
    for whole, keys in wanted.tensors.items():
        tensors = {key: stored.tensors[layout.model_key(fqn)] for key, fqn in keys.items()}
        files = split(tensors, None, _MOST_BYTES) if whole == SINGLE else {whole: tensors}
        for name in list(files)[ranks.rank :: ranks.size]:
            entries[name] = write_tensors(temporary / name, files[name], None)
        if ranks.is_first:
            dtypes = [tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point]
            other = {**wanted.files, **index_of(files)}
            if _CONFIG in other and dtypes:  # The module's parameters may be of another dtype than the master weights.
                config = {**json.loads(other[_CONFIG]), "dtype": layout.dtype_name(max(dtypes, key=dtypes.count))}
                other[_CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
            entries |= {name: write_file(temporary / name, data) for name, data in other.items()}
    return entries


def _complete(
    temporary: Path, target: Path, token: str, parts: Path, wanted: Skeleton, written: list[dict[str, FileEntry]]
) -> None:
    """On rank 0: the manifest, then all of it in place."""
    files = {name: entry for entries in written for name, entry in entries.items()}
    facts = replace(open_portable(parts, compared=False).facts, world_size=len(written), versions=library_versions())
    manifest = Manifest(facts=facts, tensors={}, aliases={}, slots={}, files=files)
    write_file(temporary / layout.MANIFEST, manifest.to_json().encode())
    commit.publish(temporary, target, token)
