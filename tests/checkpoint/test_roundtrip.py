"""Tensors written under one engine, mesh and number of ranks, read under others."""

from __future__ import annotations

import os
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
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole


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


@pytest.mark.parametrize(
    ("writer", "writers", "reader", "readers"),
    [
        ("plain", 1, "fsdp-2", 2),
        ("fsdp-2", 2, "plain", 1),
        ("fsdp-2", 2, "fsdp-3", 3),
        ("fsdp-3", 3, "fsdp-1x2", 2),
        ("ddp", 2, "fsdp-1x2", 2),
        ("fsdp-2x1", 2, "ddp", 2),
        ("fsdp-offload-2", 2, "fsdp-1", 1),
        ("ddp", 3, "fsdp-offload-2", 2),
    ],
)
def test_what_one_cut_wrote_another_reads_bitwise(tmp_path, writer, writers, reader, readers):
    path = str(tmp_path / "a.ckpt")
    written = run_distributed(save_trained, writers, path, writer)[0]
    assert {key.rpartition(".")[2] for key in written if key.startswith("optimizer.")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    for result in run_distributed(load_into_another, readers, path, reader):
        assert_equal(result["values"], written)
        assert result["epoch"] == 3
        assert result["lr"] == 0.1
        assert result["report"] == LoadReport(overridden=("lr of group 0 of optimizer 0 is 0.1, not 0.2",))
        assert result["scratch"].tolist() == [1.0, 1.0], "a buffer that is not persistent is the model's own"
        assert result["tied"]


def test_manifest_and_bytes_do_not_depend_on_who_wrote(tmp_path):
    """The three engines hold equal tensors here (rank 1 of DDP and FSDP sees the same batch as rank 0)."""
    found = {}
    for kind, ranks in (("plain", 1), ("ddp", 2), ("fsdp-2", 2), ("fsdp-2x1", 2)):
        path = tmp_path / f"{kind}.ckpt"
        written = run_distributed(save_trained, ranks, str(path), kind)[0]
        manifest = read_manifest(path)
        assert manifest.aliases == {"model.head.weight": "model.embed.weight"}
        assert manifest.facts.world_size == ranks
        tensors = stored(path)
        assert_equal(tensors, written)
        found[kind] = (manifest.tensors, tensors)
    for entries, tensors in found.values():
        assert entries == found["plain"][0]
        assert_equal(tensors, found["plain"][1])


def save_odd(path: str, cut: bool) -> dict[str, Tensor]:
    tensors = odd_tensors(0, cut=cut)
    save_tensors(path, tensors)
    return {key: whole(tensor) for key, tensor in tensors.items()}


def load_odd(path: str, cut: bool) -> dict[str, Tensor]:
    tensors = odd_tensors(1, cut=cut)
    load_into(path, tensors)
    return {key: whole(tensor) for key, tensor in tensors.items()}


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2), (3, 1), (2, 3)])
def test_tensors_that_are_hard_to_cut(tmp_path, writers, readers):
    """More ranks than rows, no elements, scalars, every kind of dtype, views; NaNs keep their bits."""
    path = str(tmp_path / "odd.ckpt")
    written = run_distributed(save_odd, writers, path, writers > 1)[0]
    for found in run_distributed(load_odd, readers, path, readers > 1):
        assert_equal(found, written)


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


@pytest.mark.parametrize(
    ("kind", "ranks"), [("ddp", 2), ("fsdp", 2), pytest.param("hybrid", 4, marks=pytest.mark.matrix)]
)
def test_each_byte_is_written_once_and_by_all_ranks(tmp_path, kind, ranks):
    path = tmp_path / "large.ckpt"
    total = run_distributed(save_large, ranks, str(path), kind)[0]
    sizes = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    # torch.save adds a header and alignment of about 1.6 kB to each of at most 8 x 2 + 6 boxes.
    assert total <= sum(sizes.values()) <= total + 22 * 1700
    assert len(sizes) == ranks
    assert max(sizes.values()) < 1.35 * min(sizes.values()), "the ranks share the work"
    buffers = {f"model.b{i}": torch.empty(1000) for i in range(6)}
    load_into(path, buffers, strict=False)
    assert all(buffer.eq(1).all() for buffer in buffers.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_the_tensors(tmp_path):
    path = str(tmp_path / "odd.ckpt")
    written = run_distributed(save_odd, 2, path, True)[0]
    tensors = odd_tensors(1, cut=False)
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_equal(tensors, written)


def test_another_dtype_is_cast_on_load(tmp_path):
    path = tmp_path / "a.ckpt"
    save_tensors(path, {"model.w": torch.tensor([1.0, 1 / 3])})
    half = {"model.w": torch.zeros(2, dtype=torch.bfloat16)}
    load_into(path, half)
    assert torch.equal(half["model.w"], torch.tensor([1.0, 1 / 3]).to(torch.bfloat16))


def test_the_path_of_rank_0_counts(tmp_path):
    run_distributed(save_at_own_path, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0.ckpt"]


def rows(seed: int) -> Rows:
    matrix = torch.randn(11, 3, generator=torch.Generator().manual_seed(seed))
    rank, size = dist.get_rank(), dist.get_world_size()
    return Rows(matrix, 11 * rank // size, 11 * (rank + 1) // size)


def save_rows(path: str) -> None:
    save_tensors(path, {"model.w": rows(0)})


def load_rows(path: str) -> tuple[Tensor, Tensor]:
    part, dtensor = rows(1), distribute_tensor(torch.zeros(11, 3), init_device_mesh("cpu", (3,)), [Shard(0)])
    load_into(path, {"model.w": part})
    load_into(path, {"model.w": dtensor})
    return torch.cat(list(part.boxes.values())), whole(dtensor)


def test_an_object_with_torchs_protocol_stands_for_a_tensor(tmp_path):
    path = str(tmp_path / "rows.ckpt")
    run_distributed(save_rows, 2, path)
    expected = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
    results = run_distributed(load_rows, 3, path)
    assert torch.equal(torch.cat([part for part, _ in results]), expected)
    assert all(torch.equal(tensor, expected) for _, tensor in results)


def save_at_own_path(folder: str) -> None:
    path = Path(folder) / f"{dist.get_rank()}.ckpt"
    save_tensors(path, {"model.w": torch.ones(3)})


def bytes_of_a_fit(names: dict[str, str]) -> dict[str, list[int]]:
    """By strategy, the bytes of each rank's file after a step."""
    found = {}
    for name, precision in names.items():
        trainer = quiet_trainer(strategy=name, precision=precision, max_steps=1)
        trainer.fit(TinyLM(width=48), loader())
        trainer.save_checkpoint(f"{name}-{precision}.ckpt")
        files = sorted(Path(f"{name}-{precision}.ckpt").glob("*.distcp"))
        found[f"{name} {precision}"] = [file.stat().st_size for file in files]
        dist.barrier()
    return found


REPLICATED = [("shard_ddp", "32-true"), ("shard_ddp_aligned", "bf16-mixed")]


def test_replicas_are_spread_over_the_ranks_by_bytes():
    """Masters, slots and buffers: no rank writes more than its share by the largest box."""
    largest = 48 * 145 * 4 + 1700
    for name, sizes in run_distributed(bytes_of_a_fit, 3, dict(REPLICATED))[0].items():
        assert len(sizes) == 3, name
        assert max(sizes) - min(sizes) < largest, (name, sizes)
        assert min(sizes) > 6 * largest, "each has more than that"
