"""Weights as safetensors files with a Hugging Face index, written tensor by tensor.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors#format); the library's own writer wants a file's tensors all at once.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from lightning_shard.checkpoint.files import commit, layout
from lightning_shard.checkpoint.files.contents import Contents, StoredTensor, raw_bytes
from lightning_shard.checkpoint.files.safetensors import INDEX, SINGLE
from lightning_shard.checkpoint.files.tensor_files import HashedFile
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

    Args:
        stored: a checkpoint of any form.
        folder: created where needed; files of other names in it stay, older safetensors files are refused.
        dtype: of floating-point tensors; None: as they are stored.
        module: FQN of the submodule whose tensors are wanted, under their names in it; "": the whole module.
        max_shard_bytes: a file has at most this many bytes of tensors, or one tensor.

    A tied tensor is written once, under its first name. Memory holds one tensor, and its copy in ``dtype``.

    Raises:
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
    shards = _shards(tensors, dtype, max_shard_bytes)
    single = len(shards) == 1
    names = [SINGLE if single else f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    target.mkdir(parents=True, exist_ok=True)
    for name, keys in zip(names, shards, strict=True):
        _write_file(target, name, {key: tensors[key] for key in keys}, dtype)
    if single:
        return [target / SINGLE]
    total = sum(_nbytes(tensor, dtype) for tensor in tensors.values())
    weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    # Last: without it no reader takes the files for whole.
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    _publish(target, INDEX, [index.encode()])
    return [target / name for name in (*names, INDEX)]


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
        tops = sorted(
            {
                k.removeprefix(layout.MODEL_PREFIX).split(".")[0]
                for k in stored.tensors
                if k.startswith(layout.MODEL_PREFIX)
            }
        )
        raise CheckpointMismatchError(f"there is no tensor of {module!r}; the module has {', '.join(tops)}")
    return chosen


def _target_dtype(tensor: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _nbytes(tensor: StoredTensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * _target_dtype(tensor, dtype).itemsize


def _shards(tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for key, tensor in tensors.items():
        size = _nbytes(tensor, dtype)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(key)
        used += size
    return shards


def _write_file(folder: Path, name: str, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + _nbytes(tensor, dtype)
        kind = DTYPES[_target_dtype(tensor, dtype)]
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for tensor in tensors.values():
            yield raw_bytes(tensor.read().to(_target_dtype(tensor, dtype)))

    _publish(folder, name, parts())


def _publish(folder: Path, name: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file beside its place, synced, and move it there."""
    temporary = layout.temporary_sibling(folder / name, layout.new_token())
    try:
        with HashedFile(temporary) as stream:
            for part in parts:
                stream.write(part)
        os.replace(temporary, folder / name)
    except BaseException:
        commit.delete_tree(temporary)
        raise
    commit.sync_directory(folder)
