"""The device mesh with the axes ``replicate`` and ``shard``. The product of their sizes is the number of processes.

Full sharding, hybrid sharding and pure replication are shapes of this mesh.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.arguments import checked_fields
from lightning_shard.errors import MeshError
from lightning_shard.ranks import cached_on_group

REPLICATE = "replicate"
SHARD = "shard"


@checked_fields("mesh", error=MeshError)
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the two mesh axes.

    Parameters are sharded over ``shard`` and replicated over ``replicate``. Neighbouring ranks form a ``shard`` group.
    With one process per device a group lies inside a node if its size divides the node's.
    """

    replicate: int | Literal["auto"] = 1
    """Number of replicas of the model. "auto": the world size divided by ``shard``, or one per node if both are "auto".
    """

    shard: int | Literal["auto"] = "auto"
    """Number of ranks over which a replica is sharded. "auto": the world size divided by ``replicate``, or the number
    of processes on a node if both are "auto"."""

    def __post_init__(self) -> None:
        for axis in (REPLICATE, SHARD):
            size = getattr(self, axis)
            if size != "auto" and size < 1:
                raise MeshError(
                    f"mesh.{axis} is {size!r}, but must be an integer of at least 1 or 'auto'. "
                    f"Set mesh.{axis}: auto to have it computed from the number of processes."
                )


def resolve_mesh(config: MeshConfig, *, world_size: int, processes_per_node: int) -> tuple[int, int]:
    """Shape ``(replicate, shard)`` of the mesh. MeshError: its product is not ``world_size``."""
    shard = processes_per_node if config.replicate == config.shard == "auto" else config.shard
    replicate = config.replicate
    if isinstance(shard, int) and replicate == "auto":
        replicate = world_size // shard
    elif isinstance(replicate, int) and shard == "auto":
        shard = world_size // replicate
    assert isinstance(shard, int)
    assert isinstance(replicate, int)
    if replicate * shard != world_size:
        divisors = [str(d) for d in range(1, world_size + 1) if world_size % d == 0]
        raise MeshError(
            f"mesh.replicate: {config.replicate} and mesh.shard: {config.shard} do not multiply to the {world_size} "
            "processes of the run (devices x num_nodes). "
            f"Set one to one of {', '.join(divisors)} and the other to 'auto', or change devices or num_nodes."
        )
    return replicate, shard


def build_mesh(shape: tuple[int, int], *, device_type: str, timeout: timedelta = timedelta(minutes=30)) -> DeviceMesh:
    """Build the mesh with axes ``("replicate", "shard")``, shared by runs of one shape. All ranks call it."""
    assert shape[0] * shape[1] == dist.get_world_size()
    mesh = cached_on_group(
        ("mesh", shape, device_type), lambda: init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
    )
    for axis in (REPLICATE, SHARD):
        # The axes have groups of their own, with NCCL's default of 10 minutes.
        _set_timeout(mesh.get_group(axis), timeout)
    return mesh


def shard_group_of_its_own(mesh: DeviceMesh, purpose: str) -> dist.ProcessGroup:
    """Make another group over the ranks of this rank's ``shard`` group, shared by all runs. All ranks call it."""

    def make() -> dist.ProcessGroup:
        groups = [dist.new_group(row) for row in mesh.mesh.tolist()]
        return groups[mesh[REPLICATE].get_local_rank()]

    group: dist.ProcessGroup = cached_on_group((purpose, tuple(mesh.shape)), make)
    if (timeout := cached_on_group("timeout", lambda: None)) is not None:
        _set_timeout(group, timeout)
    return group


def _set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    with suppress(RuntimeError):  # the backend has no timeout
        group.set_timeout(timeout)


def data_parallel_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """``(number of data-parallel ranks, index of this rank among them)``. Each rank reads its own data."""
    replicate, shard = mesh[REPLICATE], mesh[SHARD]
    return mesh.size(), replicate.get_local_rank() * shard.size() + shard.get_local_rank()
