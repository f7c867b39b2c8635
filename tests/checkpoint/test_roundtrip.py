"""Tensors written under one engine, mesh and number of ranks, read under others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_shard.checkpoint.files.manifest import read_manifest
from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.calls import load_into, load_module, save_tensors
from tests.checkpoint.compare import assert_equal, stored
from tests.checkpoint.nets import build, odd_tensors, save_trained, values
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
        if ranks < 3:  # a mean over three ranks is rounded
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
