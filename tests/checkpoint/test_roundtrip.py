"""Tensors written under one engine, mesh and number of ranks, read under others."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.calls import load_into, load_module, save_tensors
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.nets import Rows, build, odd_tensors, save_trained, values
from tests.groups import sampled
from tests.harness import run_distributed
from tests.models import whole


def load_into_another(path: str, kind: str) -> dict[str, Any]:
    net, optimizer = build(kind, 1)
    state, report = load_module(path, module=net, optimizers=[optimizer])
    module = net.module if kind == "ddp" else net
    return {
        "values": values(net, optimizer),
        "epoch": state["epoch"],
        "lr": optimizer.param_groups[0]["lr"],
        "report": report,
        "scratch": module.scratch.clone(),
        "tied": module.head.weight is module.embed.weight,
    }


TWO = ("ddp", "fsdp-2", "fsdp-2x1", "fsdp-1x2", "fsdp-offload-2")
KINDS = [("plain", 1), *((kind, 2) for kind in TWO), ("fsdp-3", 3)]


def save_kinds(folder: str) -> dict[str, dict[str, Tensor]]:
    ranks = dist.get_world_size()
    return {kind: save_trained(f"{folder}/{kind}.ckpt", kind) for kind, size in KINDS if size == ranks}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """A folder with a checkpoint of each kind, and what each has."""
    folder = tmp_path_factory.mktemp("written")
    found = [run_distributed(save_kinds, ranks, str(folder))[0] for ranks in (1, 2, 3)]
    return folder, found[0] | found[1] | found[2]


def test_manifest_and_bytes_do_not_depend_on_who_wrote(written):
    """The three engines hold equal tensors here (rank 1 of DDP and FSDP sees the same batch as rank 0)."""
    folder, values = written
    slots = {key.rpartition(".")[2] for key in values["plain"] if key.startswith("optimizer.")}
    assert slots == {"step", "exp_avg", "exp_avg_sq"}
    for kind, ranks in KINDS:
        manifest = read_manifest(folder / f"{kind}.ckpt")
        assert manifest.aliases == {"model.head.weight": "model.embed.weight"}
        assert manifest.facts.world_size == ranks
        assert manifest.tensors == read_manifest(folder / "plain.ckpt").tensors
        assert_equal(stored(folder / f"{kind}.ckpt"), values[kind], kind)
        assert_equal(values[kind], values["plain"], kind)


def load_kinds(folder: str, reader: str) -> dict[str, dict[str, Any]]:
    return {kind: load_into_another(f"{folder}/{kind}.ckpt", reader) for kind, _ in KINDS}


@pytest.mark.parametrize(("reader", "readers"), sampled(KINDS, 0, 2))
def test_what_one_cut_wrote_another_reads_bitwise(written, reader, readers):
    folder, values = written
    for results in run_distributed(load_kinds, readers, str(folder), reader):
        for kind, result in results.items():
            assert_equal(result["values"], values[kind], kind)
            assert result["epoch"] == 3
            assert result["lr"] == 0.1
            assert result["report"] == LoadReport(overridden=("lr of group 0 of optimizer 0 is 0.1, not 0.2",))
            assert result["scratch"].tolist() == [1.0, 1.0], "a buffer that is not persistent is the model's own"
            assert result["tied"]


def save_odd(path: str, cut: bool) -> dict[str, Tensor]:
    tensors = odd_tensors(0, cut=cut)
    save_tensors(path, tensors)
    return {key: whole(tensor) for key, tensor in tensors.items()}


def load_odd(path: str, cut: bool) -> dict[str, Tensor]:
    tensors = odd_tensors(1, cut=cut)
    load_into(path, tensors)
    return {key: whole(tensor) for key, tensor in tensors.items()}


@pytest.mark.parametrize(("writers", "readers"), sampled([(1, 3), (3, 2), (3, 1), (2, 3)], 1))
def test_tensors_that_are_hard_to_cut(tmp_path, writers, readers):
    """More ranks than rows, no elements, scalars, every kind of dtype, views; NaNs keep their bits."""
    path = str(tmp_path / "odd.ckpt")
    written = run_distributed(save_odd, writers, path, writers > 1)[0]
    for found in run_distributed(load_odd, readers, path, readers > 1):
        assert_equal(found, written)
    tensors = odd_tensors(1, cut=False)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_equal(tensors, written, "by torch itself")


def save_large(path: str, kind: str) -> int:
    size = dist.get_world_size()
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 64 + i)) for i in range(8)]
    # Views into larger storages, as FSDP's shards are into padded ones.
    buffers = [torch.full((9000,), 1.0)[:1000] for _ in range(6)]
    if kind != "ddp":
        shape = (size,) if kind == "fsdp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape)
        cut = [Shard(0)] if kind == "fsdp" else [dist.tensor.Replicate(), Shard(0)]
        weights = [nn.Parameter(distribute_tensor(w.detach(), mesh, cut)) for w in weights]
    tensors = {f"model.w{i}": weight for i, weight in enumerate(weights)}
    tensors |= {f"model.b{i}": buffer for i, buffer in enumerate(buffers)}
    save_tensors(path, tensors)
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize(("kind", "ranks"), sampled([("ddp", 2), ("fsdp", 2), ("hybrid", 4)], 0))
def test_each_byte_is_written_once_and_by_all_ranks(tmp_path, kind, ranks):
    path = tmp_path / "large.ckpt"
    total = run_distributed(save_large, ranks, str(path), kind)[0]
    sizes = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    # torch.save adds a header and alignment of about 1.6 kB to each of at most 8 x 2 + 6 boxes.
    assert total <= sum(sizes.values()) <= total + 22 * 1700
    assert len(sizes) == ranks
    assert max(sizes.values()) < 1.35 * min(sizes.values()), "the ranks share the work"


def test_another_dtype_is_cast_on_load(tmp_path):
    path = tmp_path / "a.ckpt"
    save_tensors(path, {"model.w": torch.tensor([1.0, 1 / 3])})
    half = {"model.w": torch.zeros(2, dtype=torch.bfloat16)}
    load_into(path, half)
    assert torch.equal(half["model.w"], torch.tensor([1.0, 1 / 3]).to(torch.bfloat16))


def rows(seed: int) -> Rows:
    matrix = torch.randn(11, 3, generator=torch.Generator().manual_seed(seed))
    rank, size = dist.get_rank(), dist.get_world_size()
    return Rows(matrix, 11 * rank // size, 11 * (rank + 1) // size)


def save_rows(folder: str) -> None:
    save_tensors(f"{folder}/{dist.get_rank()}.ckpt", {"model.w": rows(0)})  # the path of rank 0 counts


def load_rows(path: str) -> tuple[Tensor, Tensor]:
    part, dtensor = rows(1), distribute_tensor(torch.zeros(11, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    load_into(path, {"model.w": part})
    load_into(path, {"model.w": dtensor})
    return torch.cat(list(part.boxes.values())), whole(dtensor)


def test_an_object_with_torchs_protocol_stands_for_a_tensor(tmp_path):
    run_distributed(save_rows, 3, str(tmp_path))
    assert os.listdir(tmp_path) == ["0.ckpt"]
    expected = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
    results = run_distributed(load_rows, 2, str(tmp_path / "0.ckpt"))
    assert torch.equal(torch.cat([part for part, _ in results]), expected)
    assert all(torch.equal(tensor, expected) for _, tensor in results)
