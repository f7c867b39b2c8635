"""The processes of a run: what each knows of its place, how they are launched and connected, and what they exchange."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard import _lightning
from lightning_shard.cluster.forking import let_threads_finish_before_forks
from lightning_shard.cluster.launch import Launch
from lightning_shard.cluster.preemption import PreemptionConfig
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig, build_mesh, data_parallel_coordinates, resolve_mesh
from lightning_shard.ranks import Ranks
from lightning_shard.strategies import meeting
from lightning_shard.strategies.metering import MeteredStrategy
from lightning_shard.strategies.watching import remember_place

T = TypeVar("T")


class ConnectedStrategy(MeteredStrategy):
    """Launches and connects the processes, and lays the mesh over them."""

    def __init__(
        self,
        *,
        mesh: MeshConfig,
        timeout_seconds: float,
        init_timeout_seconds: float,
        lost_rank_seconds: float | None,
        preemption: PreemptionConfig | None,
        process_group_backend: str | None,
    ) -> None:
        """Store the settings; nothing is touched before the Trainer sets the strategy up."""
        super().__init__()
        if timeout_seconds <= 0:
            raise ConfigurationError(f"timeout_seconds is {timeout_seconds}, but must be greater than 0.")
        if init_timeout_seconds <= 0:
            raise ConfigurationError(f"init_timeout_seconds is {init_timeout_seconds}, but must be greater than 0.")
        if lost_rank_seconds is not None and lost_rank_seconds <= 0:
            raise ConfigurationError(f"lost_rank_seconds is {lost_rank_seconds}, but must be greater than 0, or null.")
        self._replacements = _lightning.Replacements()
        self.mesh_config = mesh
        self.timeout = timedelta(seconds=timeout_seconds)
        self.init_timeout_seconds = init_timeout_seconds
        self.lost_rank_seconds = lost_rank_seconds
        self.preemption = preemption or PreemptionConfig()
        self.process_group_backend = process_group_backend
        self.num_nodes = 1
        self._device_mesh: DeviceMesh | None = None

    # Facts about the processes

    @property
    def is_distributed(self) -> bool:
        """True; without it Lightning gives a custom strategy no distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def device_mesh(self) -> DeviceMesh:
        """The 2-D mesh with axes ``("replicate", "shard")``; it exists once the processes are connected."""
        assert self._device_mesh is not None, "the mesh exists once the processes are connected"
        return self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each data-parallel rank reads its own part of the data."""
        replicas, rank = data_parallel_coordinates(self.device_mesh)
        return {"num_replicas": replicas, "rank": rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and Lightning's rank-zero helpers, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _lightning.set_rank(self.global_rank)

    # Launch and connect

    def _configure_launcher(self) -> None:
        """Check what can be known before any process is started, then choose how to start them."""
        assert self.cluster_environment is not None
        meeting.check(self._launch, os.environ)
        self._check_configuration()
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = self._make_launcher()

    def _make_launcher(self) -> Any:
        assert self.cluster_environment is not None
        return _lightning.SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _check_configuration(self) -> None:
        """Refuse, before any process or parameter is touched, what can't work.

        Raises:
            ConfigurationError: on every rank alike.
        """
        self._mesh_shape()

    @property
    def _launch(self) -> Launch:
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        return meeting.launch_of(
            self.cluster_environment,
            nodes=self.num_nodes,
            devices=self.num_processes,
            gpu=self.parallel_devices[0].type == "cuda",
        )

    def _mesh_shape(self) -> tuple[int, int]:
        return resolve_mesh(
            self.mesh_config,
            world_size=self.num_nodes * self.num_processes,
            processes_per_node=self.num_processes,
        )

    def setup_environment(self) -> None:
        """Connect the processes and build the mesh. Collective: all ranks call it."""
        self._take_over_end()
        self._identify_run(os.environ)
        self._take_over_signals()
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._mark_messages()
        backend = self.process_group_backend or dist.get_default_backend_for_device(self.root_device)
        assert self.cluster_environment is not None
        device_id = None if self.root_device.type == "cpu" else self.root_device
        options: dict[str, Any] = {"timeout": self.timeout, "device_id": device_id}
        if not dist.is_initialized() and self.world_size > 1:
            store, place = meeting.meet(
                self, self.cluster_environment, self._launch, os.environ, seconds=self.init_timeout_seconds
            )
            store.set_timeout(self.timeout)
            _lightning.init_process_group(self.cluster_environment, backend, store=store, **options)
            remember_place(place)
        else:
            _lightning.init_process_group(self.cluster_environment, backend, **options)
        self._start_watch()
        # Workers of loaders, of evaluation too, are forked from here on.
        let_threads_finish_before_forks()
        self._device_mesh = build_mesh(self._mesh_shape(), device_type=self.root_device.type)
        assert self.lightning_module is not None
        _lightning.set_device_mesh(self.lightning_module, self._device_mesh)

    # Collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not dist.is_initialized():
            return
        ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        dist.barrier(device_ids=ids)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s object, on every rank."""
        return Ranks.of().broadcast(obj, src)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; anything else is returned as it is."""
        return _lightning.sync_reduce(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor
