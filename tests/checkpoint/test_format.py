"""The files of a checkpoint, read by what `examples/guides/checkpoint_format.md` says alone."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_shard.tools import export

SAVED = Path(__file__).parent / "version_8" / "fsdp.ckpt"


def _read(path: Path) -> dict[str, Tensor]:
    manifest = json.loads((path / "manifest.json").read_text())
    for name, said in manifest["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() in json.dumps(said), name
    boxes, keys = (path / "boxes.bin").read_bytes(), sorted(manifest["tensors"])
    files = sorted(name for name in manifest["files"] if name.endswith(".distcp"))
    at, found = 16 * len(keys), {}
    for key, (count, size) in zip(keys, np.frombuffer(boxes[:at], "<i8").reshape(-1, 2), strict=True):
        dtype, *shape = manifest["tensors"][key]
        full = torch.zeros(shape, dtype=getattr(torch, dtype))
        columns = np.frombuffer(zlib.decompress(boxes[at : at + size]), "<i8").reshape(-1, count).cumsum(1)
        for file, first, length, *place in columns.T.tolist():
            box = io.BytesIO((path / files[file]).read_bytes()[first : first + length])
            offsets, sizes = place[: full.dim()], place[full.dim() :]
            part = tuple(slice(offset, offset + n) for offset, n in zip(offsets, sizes, strict=True))
            full[part] = torch.load(box, weights_only=True).reshape(sizes)
        found[key], at = full, at + size
    return found


def test_what_the_guide_says_is_enough_to_read_the_tensors(tmp_path: Path) -> None:
    export(SAVED, tmp_path / "out")
    found = _read(SAVED)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported
    for name, value in exported.items():
        assert torch.equal(found[f"model.{name}"], value), name
