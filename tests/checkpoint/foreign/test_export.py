"""Weights as safetensors files: contents, refusals, and the host memory that conversions take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.save import write_portable
from lightning_shard.errors import (
    CheckpointError,
    CheckpointMismatchError,
)
from tests.checkpoint.calls import save_tensors
from tests.checkpoint.compare import assert_equal, stored
from tests.harness import ROOT


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 not a mapping
    return found


def test_export_is_read_by_the_library(tmp_path: Path, trained: Path) -> None:
    files = export(open_any(trained), tmp_path / "out")
    assert [file.name for file in files] == ["model.safetensors"]
    weights = {k.removeprefix("model."): t for k, t in stored(trained).items() if k.startswith("model.")}
    assert_equal(read_safetensors(tmp_path / "out"), weights)
    with pytest.raises(CheckpointError, match=r"has model\.safetensors of an earlier export"):
        export(open_any(trained), tmp_path / "out")
    export(open_any(trained), tmp_path / "head", module="head")
    found = read_safetensors(tmp_path / "head")
    assert torch.equal(found["weight"], stored(trained)["model.embed.weight"]), "tied to one outside of it"
    assert found.keys() == {"weight", "bias"}
    with pytest.raises(CheckpointMismatchError, match="no tensor of 'tail'; the module has body, count, embed"):
        export(open_any(trained), tmp_path / "tail", module="tail")
    save_tensors(tmp_path / "a.ckpt", {"model.c": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match="no dtype for complex64"):
        export(open_any(tmp_path / "a.ckpt"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_export_in_shards_with_an_index(tmp_path: Path, trained: Path) -> None:
    files = export(open_any(trained), tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=64)
    weights = {k.removeprefix("model."): t for k, t in stored(trained).items() if k.startswith("model.")}
    found = read_safetensors(tmp_path / "out")
    assert_equal(found, {key: tensor.to(torch.bfloat16) for key, tensor in weights.items()})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    assert len(files) > 3
    assert {file.name for file in files} == {*index["weight_map"].values(), "model.safetensors.index.json"}


MEASURE = """
import re, sys, torch
from pathlib import Path
from lightning_shard.checkpoint.foreign.hugging_face_folders import export
from lightning_shard.checkpoint.inspect import open_any
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.files.manifest import Facts
from tests.checkpoint.calls import save_tensors
from lightning_shard.checkpoint.save import write_portable

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def growth(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    print(status("VmHWM") - before)

torch.set_num_threads(1)
tensors = {f"model.w{i}": torch.full((1024, 1024), float(i)) for i in range(32)}
save_tensors("a.ckpt", tensors, facts=Facts(engine="test", policy="fp32"))
del tensors
growth(lambda: write_full("full.ckpt", open_any("a.ckpt")))
growth(lambda: write_portable("back.ckpt", open_any("full.ckpt")))
growth(lambda: export(open_any("back.ckpt"), "out", dtype=torch.bfloat16, max_shard_bytes=50_000_000))
growth(lambda: torch.load("full.ckpt", weights_only=True))
"""


@pytest.mark.matrix
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """32 tensors of 4 MiB: each conversion holds a stored box, the tensor made of it and its copy at most."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    full, back, exported, whole = map(int, run.stdout.split())
    # Memory that the earlier steps gave back to malloc, not to the system, is not counted again.
    assert whole > 24 * 2**22, "the whole at once is seen as such"
    # Three tensors, their bytes on the way from and to the files, and what Python allocates for the first time.
    assert max(full, back, exported) < 8 * 2**22


@pytest.mark.parametrize("source", ["portable", "full"])
def test_nothing_is_made_of_a_damaged_checkpoint(tmp_path: Path, trained: Path, source: str) -> None:
    path, files = trained, [next(trained.glob("*.distcp"))]
    if source == "full":
        path = tmp_path / "one.ckpt"
        write_full(path, open_any(trained))
        files = [path]
    data = bytearray(files[0].read_bytes())
    place = data.index(stored(path)["model.embed.weight"].numpy().tobytes())
    data[place + 5] ^= 0x40
    files[0].write_bytes(data)
    for name, write in {"out": export, "a.ckpt": write_portable, "b.ckpt": write_full}.items():
        with pytest.raises(CheckpointError, match=r"checksum|Bad CRC-32"):
            write(*((open_any(path), tmp_path / name) if write is export else (tmp_path / name, open_any(path))))
        assert not (tmp_path / name).exists()
