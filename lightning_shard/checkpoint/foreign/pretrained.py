"""Pretrained weights from safetensors files into a module, sharded or not.

Every rank reads the parts that it has and nothing else, one box at a time, so that the full model is never on the host,
let alone once per rank.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard

from lightning_shard.checkpoint.files.safetensors import Entry, SafetensorsReader
from lightning_shard.checkpoint.files.tensor_files import chunks_of
from lightning_shard.checkpoint.matching import LoadReport, match
from lightning_shard.checkpoint.module_state import sharded_names
from lightning_shard.errors import CheckpointError, CheckpointMismatchError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors import masters
from lightning_shard.tensors.names import Names

Rename = Mapping[str, str | None]


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
) -> LoadReport:
    """Fill a module's parameters and persistent buffers in place from safetensors files. All ranks call it.

    Call it once the module has memory and was sharded, for a LightningModule from ``on_fit_start``::

        def on_fit_start(self):
            load_pretrained(self.encoder, "weights/minilm", rename={"pooler": None})

    A checkpoint that the Trainer resumes from is read afterwards and so wins. Values are cast to the dtype of the
    tensor that they go to; masters are fp32 and get fp32 values unrounded.

    Args:
        module: the module, or a submodule of it, whose names the files have.
        path: a file, an index of many (``model.safetensors.index.json``), or a directory with one of them; on every
            rank.
        rename: beginnings of the files' names, cut at a dot, to what stands there in the module; the longest that
            fits counts. "" is the beginning of every name, None leaves tensors out: ``{"bert": "", "cls": None}``.
        strict: refuse tensors of the module that the files lack and tensors of the files that the module lacks.
        group: as for checkpoints; default: the default process group.

    Returns:
        What was left alone on either side; nothing if ``strict``.

    Raises:
        CheckpointError: the same on every rank, before any value was changed: no such files, damaged ones,
            CheckpointMismatchError for what does not fit, a module on the meta device.
    """
    ranks = Ranks.of(group)
    with SafetensorsReader() as reader:

        def prepare() -> tuple[Names, dict[str, Any], dict[str, Entry], LoadReport]:
            names = sharded_names(module)
            live = masters.live_tensors(names.tensors)
            entries = _renamed(reader.entries(path), rename or {})
            shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
            found = match(shapes, names.aliases, {name: entry.shape for name, entry in entries.items()})
            report = found.judge(path, strict, where="the files", hint="rename maps names. ")
            if on_meta := [name for name in found.sources if getattr(live[name], "is_meta", False)]:
                raise CheckpointError(
                    f"{on_meta[0]} is on the meta device and has no memory yet: load pretrained weights in "
                    "on_fit_start, when the strategy has sharded the module, not in configure_model"
                )
            for alias, name in names.aliases.items():
                tied = alias in entries and name in entries
                if tied and not _same(live[name], entries[alias], entries[name], reader):
                    raise CheckpointMismatchError(
                        f"{path} has different values for {name} and {alias}, which the module ties. Untie them, or "
                        f"leave one out with rename={{{entries[alias].name!r}: None}}"
                    )
            chosen = {name: entries[source] for name, source in found.sources.items()}
            return names, {name: live[name] for name in chosen}, chosen, report

        names, tensors, chosen, report = ranks.agree(f"opening {path}", prepare)
        ranks.agree(f"reading {path}", lambda: fill(tensors, chosen, reader))
    masters.publish(names.tensors[name] for name in chosen)
    return report


@torch.no_grad()
def fill(tensors: Mapping[str, Any], entries: Mapping[str, Entry], reader: SafetensorsReader) -> None:
    """Copy into each tensor the parts of its entry that this rank has, casting. No communication.

    ``tensors``: name to plain tensor, DTensor or what stands for one.
    """
    for name, tensor in tensors.items():
        for chunk in chunks_of(tensor):
            if chunk.sizes.numel() == 0:
                continue
            target = find_tensor_shard(tensor, MetadataIndex(name, chunk.offsets))
            target.detach().copy_(reader.read(entries[name], tuple(chunk.offsets), tuple(chunk.sizes)))


def _renamed(entries: Mapping[str, Entry], rename: Rename) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for key, entry in entries.items():
        name = _new_name(key, rename)
        if name is None:
            continue
        if name in found:
            raise CheckpointMismatchError(f"rename gives {found[name].name} and {key} one name, {name}")
        found[name] = entry
    return found


def _new_name(key: str, rename: Rename) -> str | None:
    fitting = [old for old in rename if old.rstrip(".") in ("", key) or key.startswith(old.rstrip(".") + ".")]
    old = max(fitting, key=len, default="")
    new = rename.get(old, "")
    if new is None:
        return None
    rest = key[len(old.rstrip(".")) :].lstrip(".")
    return ".".join(part for part in (new.rstrip("."), rest) if part)


def _same(tensor: Any, one: Entry, other: Entry, reader: SafetensorsReader) -> bool:
    """Whether two entries have the same values, compared where this rank has ``tensor``."""
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks_of(tensor) if c.sizes.numel()]
    return one.shape == other.shape and all(torch.equal(reader.read(one, *b), reader.read(other, *b)) for b in boxes)
