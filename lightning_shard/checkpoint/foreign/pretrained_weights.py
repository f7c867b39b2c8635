"""Loading pretrained weights from safetensors files into a module, sharded or not. Every rank reads only the parts that
it has, one box at a time.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_shard import errors
from lightning_shard.checkpoint.files.layout import StrPath, check_relative, damaged_if
from lightning_shard.checkpoint.files.location import refuse_url
from lightning_shard.checkpoint.files.tensor_files import chunks_of, fill
from lightning_shard.checkpoint.matching import LoadReport, match_names
from lightning_shard.checkpoint.optimizer_state import sharded_names
from lightning_shard.ranks import Ranks
from lightning_shard.tensors import masters
from lightning_shard.tensors.names import Names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Entry(NamedTuple):
    file: Path
    name: str
    shape: tuple[int, ...]


class SafetensorsReader(ExitStack):
    """Reads boxes of tensors. The files are mapped while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}
        self.callback(self._opened.clear)

    def entries(self, path: StrPath) -> dict[str, Entry]:
        """Return key to entry of every tensor in the file, index (``*.index.json``) or directory ``path``.
        CheckpointNotFoundError. CheckpointCorruptError: a file that is damaged or outside of the directory.
        """
        refuse_url(path, "safetensors files")
        found: dict[str, Entry] = {}
        for file in _files(Path(path)):
            if not file.is_file():
                raise errors.CheckpointCorruptError(f"{file} is no regular file")
            with damaged_if(f"{file} is no whole safetensors file"):
                opened = self._opened[file] = self.enter_context(safe_open(file, framework="pt", device="cpu"))
            for name in sorted(opened.keys()):
                found[name] = Entry(file, name, tuple(opened.get_slice(name).get_shape()))
        return found

    def read(self, entry: Entry, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the box of a tensor at ``offsets``, in the file's dtype, and no other bytes."""
        opened = self._opened[entry.file]
        if tuple(sizes) == entry.shape:
            return opened.get_tensor(entry.name)
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return opened.get_slice(entry.name)[box]


def _files(path: Path) -> list[Path]:
    """Return the files of the file, index or directory ``path``."""
    if path.is_dir():
        path = next((file for file in [path / SINGLE, path / INDEX] if file.is_file()), path)
    if not path.is_file():
        where = f"{path} has neither {SINGLE} nor {INDEX}" if path.is_dir() else f"there is no file {path}"
        raise errors.CheckpointNotFoundError(f"no pretrained weights: {where}")
    if path.suffix != ".json":
        return [path]
    with damaged_if(f"{path} is no index of safetensors files", path):
        names = {check_relative(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
        return [path.parent / name for name in sorted(names)]


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

    A checkpoint that the Trainer resumes from is read afterwards and so wins. Values are cast to the dtype of their
    tensor. Masters are fp32 and get fp32 values unrounded.

    Args:
        module: the module, or a submodule of it, whose names the files have.
        path: a file, an index of many (``model.safetensors.index.json``), or a directory with one of them; on every
            rank.
        rename: prefixes of the files' names, cut at a dot, to prefixes in the module. The longest match counts. "" is
            a prefix of every name, None leaves tensors out: ``{"bert": "", "cls": None}``.
        strict: refuse tensors of the module that the files lack and tensors of the files that the module lacks.
        group: process group of the ranks. None: the default group.

    Returns:
        The names left alone on either side, none if ``strict``.

    Raises:
        CheckpointError: the same on every rank, before any value was changed: no such files, damaged ones,
            CheckpointMismatchError for names or shapes that differ, a module on the meta device.
    """
    ranks = Ranks.of(group)
    with SafetensorsReader() as reader:

        def prepare() -> tuple[Names, dict[str, Any], dict[str, Entry], LoadReport]:
            names = sharded_names(module)
            live = masters.live_tensors(names.tensors)
            entries = _renamed(reader.entries(path), rename or {})
            shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
            found = match_names(shapes, names.aliases, {name: entry.shape for name, entry in entries.items()})
            report = found.report_or_raise(path, strict, where="the files", hint="rename maps names. ")
            if on_meta := [name for name in found.sources if getattr(live[name], "is_meta", False)]:
                raise errors.CheckpointError(
                    f"{on_meta[0]} is on the meta device and has no memory yet: load pretrained weights in "
                    "on_fit_start, when the strategy has sharded the module, not in configure_model"
                )
            for alias, name in names.aliases.items():
                tied = alias in entries and name in entries
                if tied and not _same(live[name], entries[alias], entries[name], reader):
                    raise errors.CheckpointMismatchError(
                        f"{path} has different values for {name} and {alias}, which the module ties. Untie them, or "
                        f"leave one out with rename={{{entries[alias].name!r}: None}}"
                    )
            chosen = {name: entries[source] for name, source in found.sources.items()}
            return names, {name: live[name] for name in chosen}, chosen, report

        names, tensors, chosen, report = ranks.agree(f"opening {path}", prepare)

        def read() -> None:
            for name, tensor in tensors.items():
                fill(name, tensor, partial(reader.read, chosen[name]))

        ranks.agree(f"reading {path}", read)
    masters.refresh_model_weights(names.tensors[name] for name in chosen)
    return report


def _renamed(entries: Mapping[str, Entry], rename: Rename) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for key, entry in entries.items():
        fitting = [old for old in rename if old.rstrip(".") in ("", key) or key.startswith(old.rstrip(".") + ".")]
        old = max(fitting, key=len, default="")
        if (new := rename.get(old, "")) is None:
            continue
        rest = key[len(old.rstrip(".")) :].lstrip(".")
        name = ".".join(part for part in (new.rstrip("."), rest) if part)
        if name in found:
            raise errors.CheckpointMismatchError(f"rename gives {found[name].name} and {key} one name, {name}")
        found[name] = entry
    return found


def _same(tensor: Any, one: Entry, other: Entry, reader: SafetensorsReader) -> bool:
    """True if two entries have the same values in this rank's boxes of ``tensor``."""
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks_of(tensor) if c.sizes.numel()]
    return one.shape == other.shape and all(torch.equal(reader.read(one, *b), reader.read(other, *b)) for b in boxes)
