"""Mesh sizes as arithmetic, and the mesh on real processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_shard.errors import MeshError
from lightning_shard.mesh import MeshConfig, build_mesh, data_parallel_coordinates, resolve_mesh
from tests.groups import sampled
from tests.harness import run_distributed

SIZES = st.integers(1, 64)
AXES = st.one_of(st.just("auto"), SIZES)


@given(replicate=AXES, shard=AXES, nodes=SIZES, per_node=SIZES)
def test_a_mesh_either_covers_the_world_or_says_why_not(replicate: Any, shard: Any, nodes: int, per_node: int) -> None:
    world = nodes * per_node
    config = MeshConfig(replicate=replicate, shard=shard)
    fixed = [size for size in (replicate, shard) if size != "auto"]
    fits = {0: True, 1: fixed and world % fixed[0] == 0, 2: len(fixed) == 2 and fixed[0] * fixed[-1] == world}
    if not fits[len(fixed)]:
        with pytest.raises(MeshError) as error:
            resolve_mesh(config, world_size=world, processes_per_node=per_node)
        assert all(str(number) in str(error.value) for number in [*fixed, world])
        return
    shape = resolve_mesh(config, world_size=world, processes_per_node=per_node)
    assert shape[0] * shape[1] == world
    assert replicate in ("auto", shape[0])
    assert shard in ("auto", shape[1])


@given(nodes=SIZES, per_node=SIZES)
def test_two_autos_shard_inside_a_node_and_replicate_across_nodes(nodes: int, per_node: int) -> None:
    config = MeshConfig(replicate="auto", shard="auto")
    assert resolve_mesh(config, world_size=nodes * per_node, processes_per_node=per_node) == (nodes, per_node)


@pytest.mark.parametrize("size", [0, 2.0, True])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_sizes_that_are_none_are_refused_by_name_and_value(axis: str, size: Any) -> None:
    with pytest.raises(
        MeshError, match=rf"mesh\.{axis} is {size!r}, but must be an integer (of at least 1 )?or 'auto'"
    ):
        MeshConfig(**{axis: size})


def _coordinates(shape: tuple[int, int]) -> dict[str, Any]:
    mesh = build_mesh(shape, device_type="cpu", timeout=timedelta(seconds=77))
    replicas, place = data_parallel_coordinates(mesh)
    return {
        "names": mesh.mesh_dim_names,
        "size": (mesh["replicate"].size(), mesh["shard"].size()),
        "shard_group": dist.get_process_group_ranks(mesh.get_group("shard")),
        "replicate_group": dist.get_process_group_ranks(mesh.get_group("replicate")),
        "timeouts": {mesh.get_group(axis)._get_backend(torch.device("cpu")).options._timeout for axis in (0, 1)},
        "place": place,
        "samples": list(DistributedSampler(range(8), num_replicas=replicas, rank=place, shuffle=False)),
    }


def _check_coordinates(shapes: list[tuple[int, int]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for shape in shapes:
        found = _coordinates(shape)
        assert found["names"] == ("replicate", "shard")
        assert found["size"] == shape
        assert found["timeouts"] == {timedelta(seconds=77)}
        # Neighbours share a shard group, so that it lies inside a node.
        first = rank // shape[1] * shape[1]
        assert found["shard_group"] == list(range(first, first + shape[1]))
        assert found["replicate_group"] == list(range(rank % shape[1], ranks, shape[1]))
        # Each rank reads its own data, whatever the shape.
        assert found["place"] == rank
        assert found["samples"] == list(range(rank, 8, ranks))


@pytest.mark.parametrize(("ranks", "shapes"), sampled([(2, [(1, 2), (2, 1)]), (4, [(1, 4), (2, 2), (4, 1)])], 0))
def test_the_mesh_of_processes(ranks: int, shapes: list[tuple[int, int]]) -> None:
    run_distributed(_check_coordinates, ranks, shapes)
