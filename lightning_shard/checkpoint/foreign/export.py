"""Weights as safetensors files with a Hugging Face index, written tensor by tensor.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors#format); the library's own writer wants a file's tensors all at once.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.contents import Contents, StoredTensor, raw_bytes
from lightning_shard.checkpoint.files.layout import FileEntry
from lightning_shard.checkpoint.files.safetensors import INDEX, SINGLE
from lightning_shard.checkpoint.files.tensor_files import HashedFile, write_file
from lightning_shard.errors import CheckpointError, CheckpointMismatchError

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
    """Write the weights and buffers of ``stored`` into ``folder``; returns the files. One process calls it.

    Arguments as of `lightning_shard.tools.export`. Files of other names in ``folder`` stay, older safetensors files are
    refused; a file has at most ``max_shard_bytes`` of tensors, or one tensor. A tied tensor is written once, under its
    first name. Memory holds one tensor, and its copy in ``dtype``.

    CheckpointError: nothing was written, or no file that was not whole.
    """
    target = Path(folder)
    tensors = _selected(stored, module)
    if unknown := sorted({layout.dtype_name(t.dtype) for t in tensors.values() if t.dtype not in DTYPES}):
        raise CheckpointError(f"safetensors has no dtype for {', '.join(unknown)}")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; safetensors files are exported into a directory")
    if older := sorted(path.name for path in target.glob("*.safetensors*")) if target.is_dir() else []:
        raise CheckpointError(f"{target} has {', '.join(older[:3])} of an earlier export: choose an empty directory")
    files = split(tensors, dtype, max_shard_bytes)
    # The index last: without it no reader takes the files for whole.
    index = index_of(files, dtype)
    written = [target / name for name in (*files, *index)]
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        for name, chosen in files.items():
            _publish(target, name, partial(write_tensors, tensors=chosen, dtype=dtype))
        for name, data in index.items():
            _publish(target, name, partial(write_file, data=data))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        if is_new:
            target.rmdir()
        raise
    return written


def _selected(stored: Contents, module: str) -> dict[str, StoredTensor]:
    """Name in the submodule to tensor, each tensor once."""
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


def _target_dtype(tensor: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _nbytes(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * _target_dtype(tensor, dtype).itemsize


def split(
    tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, most_bytes: int
) -> dict[str, dict[str, StoredTensor]]:
    """Name of each safetensors file to its tensors: at most ``most_bytes``, or one tensor."""
    shards: list[dict[str, StoredTensor]] = [{}]
    used = 0
    for key, tensor in tensors.items():
        size = _nbytes(tensor, dtype)
        if shards[-1] and used + size > most_bytes:
            shards.append({})
            used = 0
        shards[-1][key] = tensor
        used += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def index_of(files: Mapping[str, Mapping[str, StoredTensor]], dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """Name and contents of the index of what `split` gave; nothing for one file."""
    if len(files) == 1:
        return {}
    total = sum(_nbytes(tensor, dtype) for tensors in files.values() for tensor in tensors.values())
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def write_tensors(path: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None) -> FileEntry:
    """Write a safetensors file, synced, one tensor at a time; floating-point ones in ``dtype`` if that is not None."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + _nbytes(tensor, dtype)
        kind = DTYPES[_target_dtype(tensor, dtype)]
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(raw_bytes(tensor.read().to(_target_dtype(tensor, dtype))))
    return stream.entry()


def _publish(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a file beside its place and move it there."""
    temporary = layout.temporary_sibling(folder / name, layout.new_token())
    with commit.deleted_on_failure(temporary):
        write(temporary)
        os.replace(temporary, folder / name)
    commit.sync_directory(folder)
