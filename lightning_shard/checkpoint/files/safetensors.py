"""Reading slices of tensors from one safetensors file or an index of many."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_shard.checkpoint.files.layout import StrPath, check_relative
from lightning_shard.checkpoint.files.place import refuse_url
from lightning_shard.errors import CheckpointCorruptError, CheckpointNotFoundError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


class SafetensorsReader(ExitStack):
    """Reads boxes of tensors; the files are mapped, not loaded, while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}
        self.callback(self._opened.clear)

    def entries(self, path: StrPath) -> dict[str, Entry]:
        """Key to entry of every tensor in the file, the index (``*.index.json``) or the directory ``path``.

        Raises CheckpointNotFoundError, or CheckpointCorruptError for a file that is damaged or leaves the directory.
        """
        refuse_url(path, "safetensors files")
        found: dict[str, Entry] = {}
        for file, keys in _files(Path(path)).items():
            opened = self._open(file)
            present = set(opened.keys())
            if absent := sorted(set(keys or present) - present):
                raise CheckpointCorruptError(f"{file} lacks {', '.join(absent[:3])}, which its index says it has")
            for name in keys or sorted(present):
                found[name] = Entry(file=file, name=name, shape=tuple(opened.get_slice(name).get_shape()))
        return found

    def read(self, entry: Entry, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The box of a tensor at ``offsets``, in the file's dtype; only its bytes are read."""
        opened = self._open(entry.file)
        try:
            if tuple(sizes) == entry.shape:
                return opened.get_tensor(entry.name)
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            return opened.get_slice(entry.name)[box]
        except SafetensorError as error:
            raise CheckpointCorruptError(f"{entry.file}: {entry.name} can't be read: {error}") from error

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            if not file.is_file():
                raise CheckpointCorruptError(f"{file} is no regular file")
            try:
                self._opened[file] = self.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointCorruptError(f"{file} is no whole safetensors file: {error}") from error
        return self._opened[file]


def _files(path: Path) -> Mapping[Path, list[str] | None]:
    """File to the keys that are wanted of it; None: all that it has."""
    if path.is_dir():
        candidates = [path / SINGLE, path / INDEX]
        path = next((file for file in candidates if file.is_file()), path)
    if not path.is_file():
        where = f"{path} has neither {SINGLE} nor {INDEX}" if path.is_dir() else f"there is no file {path}"
        raise CheckpointNotFoundError(f"no pretrained weights: {where}")
    if path.suffix != ".json":
        return {path: None}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str]] = {}
        for key, name in weight_map.items():
            files.setdefault(path.parent / check_relative(name), []).append(key)
        return files
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{path} is no index of safetensors files: {error}") from error
