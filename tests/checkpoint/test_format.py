"""The files of a checkpoint, read by what `examples/guides/checkpoint_format.md` says alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from lightning_shard.checkpoint.files.layout import SlotName
from lightning_shard.tools import export
from tests.checkpoint.calls import save_tensors

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


def test_many_small_tensors_take_less_than_with_torchs_own(tmp_path: Path) -> None:
    names = [f"layers.{i // 20}.weight_{i % 20}" for i in range(500)]
    state = {f"model.{name}": torch.full((13,), float(i)) for i, name in enumerate(names)}
    slots = {
        n.key: n for name in names for n in (SlotName(0, name, slot) for slot in ("exp_avg", "exp_avg_sq", "step"))
    }
    state |= {key: torch.full(() if name.slot == "step" else (13,), 0.5) for key, name in slots.items()}
    save_tensors(tmp_path / "a.ckpt", state, slots=slots)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), checkpoint_id=tmp_path / "theirs", no_dist=True)
        found = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(found, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    own, theirs = (sum(map(os.path.getsize, (tmp_path / name).iterdir())) for name in ("a.ckpt", "theirs"))
    assert own < theirs
