"""Launch of processes, their rendezvous, process group and mesh, and the watch for lost ranks."""

import atexit
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard._lightning import Replacements, loops, processes
from lightning_shard.checkpoint.files.manifest import library_versions
from lightning_shard.cluster import traces
from lightning_shard.cluster.network import let_threads_finish_before_forks, prepare_gloo
from lightning_shard.cluster.preemption import Preempted
from lightning_shard.cluster.preflight import Rendezvous, attempt_of, compare_ranks, connect_store
from lightning_shard.cluster.slurm_job import Launch, meeting_point, read_job
from lightning_shard.cluster.traces import Progress
from lightning_shard.cluster.watch import RankWatch
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig, build_mesh, resolve_mesh
from lightning_shard.ranks import cached_on_group, forget_made_groups, set_timeout


class Processes:
    """Connects the processes and builds the mesh."""

    def __init__(
        self, mesh: MeshConfig, timeout_seconds: float, init_timeout_seconds: float, backend: str | None
    ) -> None:
        self._axes, self._init_timeout_seconds, self._backend = mesh, init_timeout_seconds, backend
        self.timeout = timedelta(seconds=timeout_seconds)  # of collectives
        self._mesh: DeviceMesh | None = None
        self._device = torch.device("cpu")

    @property
    def mesh(self) -> DeviceMesh:
        """2-D mesh with axes ``("replicate", "shard")``, after the processes are connected."""
        assert self._mesh is not None, "the mesh exists once the processes are connected"
        return self._mesh

    def connect(
        self,
        environment: ClusterEnvironment,
        launch: Launch,
        device: torch.device,
        *,
        settings: Mapping[str, str],
        root: str | None,
    ) -> None:
        """Connect the processes. ConfigurationError: some are missing, or ``settings`` differ. All ranks call it."""
        self._device = device
        options: dict[str, Any] = {"timeout": self.timeout, "device_id": None if device.type == "cpu" else device}
        backend = self._backend or dist.get_default_backend_for_device(device)
        world = environment.world_size()
        processes.refuse_smaller_group(world)
        if not dist.is_initialized() and world > 1:
            os.environ.update(meeting_point(read_job(os.environ), launch, os.environ))
            at = Rendezvous(
                address=environment.main_address,
                port=environment.main_port,
                rank=environment.global_rank(),
                world_size=world,
                agent=attempt_of(os.environ, world) if launch.launcher == "torchrun" else None,
            )
            store = connect_store(at, self._init_timeout_seconds)
            writes = root is not None and launch.nodes > 1 and not re.match(r"\w+://", root)
            facts = {"node": socket.gethostname(), "versions": library_versions(), "settings": dict(settings)}
            folder = Path(str(root)) if writes else None
            compare_ranks(store, at, facts, self._init_timeout_seconds, folder)
            prepare_gloo(at.address, os.environ, gpu=device.type != "cpu")
            store.set_timeout(self.timeout)
            processes.init_process_group(environment, backend, store=store, **options)
            remember_rendezvous(at)
        else:
            processes.init_process_group(environment, backend, **options)
        set_timeout(self.timeout)
        let_threads_finish_before_forks()  # worker processes of loaders are forked from here on, in evaluation too

    def lay_mesh(self, *, per_node: int) -> DeviceMesh:
        """Build the mesh over all processes. ``per_node``: processes of a node. All ranks call it."""
        shape = resolve_mesh(self._axes, world_size=dist.get_world_size(), processes_per_node=per_node)
        self._mesh = build_mesh(shape, device_type=self._device.type, timeout=self.timeout)
        return self._mesh

    def barrier(self, *, skip: bool = False) -> None:
        if dist.is_initialized() and not skip:
            dist.barrier(device_ids=None if self._device.type == "cpu" else [self._device.index])


def nodes_started(environment: ClusterEnvironment, environ: Mapping[str, str], nodes: int, devices: int) -> int:
    """Number of nodes: as torchrun started them (``--nnodes 1:2`` may start fewer), else ``num_nodes``."""
    size = environment.world_size()
    local = environ.get("LOCAL_WORLD_SIZE") == str(devices)
    if not (isinstance(environment, TorchElasticEnvironment) and local) or size == nodes * devices or size % devices:
        return nodes
    rank_zero_info(f"num_nodes is {size // devices}, as torchrun has started the processes, and not {nodes}.")
    return size // devices


def device_of(devices: Sequence[torch.device], local_rank: int) -> torch.device:
    """Device of a process. ConfigurationError: the launcher started more processes on this node than ``devices``."""
    if local_rank >= len(devices):
        raise ConfigurationError(
            f"a process with local rank {local_rank} was started, but devices is {len(devices)}. Set devices to the "
            "number of processes that the launcher starts on a node (torchrun --nproc-per-node)."
        )
    return devices[local_rank]


def launch_of(environment: ClusterEnvironment, *, nodes: int, devices: int, gpu: bool) -> Launch:
    kinds = ((SLURMEnvironment, "slurm"), (TorchElasticEnvironment, "torchrun"), (LightningEnvironment, "lightning"))
    launcher = next((name for kind, name in kinds if isinstance(environment, kind)), type(environment).__name__)
    return Launch(nodes=nodes, devices=devices, launcher=launcher, gpu=gpu)


def remember_rendezvous(at: Rendezvous) -> None:
    """Keep the rendezvous of the process group for later Trainers in the same processes."""
    cached_on_group("met", lambda: [at, 0])
    # Lightning's own hook, for NCCL, would wait after an exception too.
    atexit.unregister(processes.destroy_at_exit)
    atexit.unregister(_destroy_group)
    atexit.register(_destroy_group)


def count_run() -> tuple[Rendezvous, int] | None:
    """Rendezvous and number of the next run on this process group. None: another library made it. All ranks call it."""
    met: list[Any] | None = cached_on_group("met", lambda: None) if dist.is_initialized() else None
    if met is None:
        return None
    met[1] += 1
    return met[0], met[1]


def _destroy_group() -> None:
    """Destroy this package's process group at exit. Else its thread aborts the process by freeing tensors after the
    interpreter has ended. After an exception the group is left, since destroying it would wait for other ranks.
    """
    if count_run() is not None and not hasattr(sys, "last_value"):
        forget_made_groups()
        dist.destroy_process_group()
        time.sleep(0.05)  # The group's thread may still free the last collective's tensors.


class RunWatch:
    """Watches the ranks of one run after the other."""

    def __init__(
        self, lost_rank_seconds: float | None, stuck_seconds: float | None, exit_process: Callable[[int], None]
    ) -> None:
        """See `RankWatch` for the seconds. None turns the watch off."""
        self._lost_rank_seconds, self._stuck_seconds = lost_rank_seconds, stuck_seconds
        self._exit_process = exit_process
        self._watch: RankWatch | None = None
        self._failed: RankWatch | None = None  # still tells other ranks of a failure

    def record_collectives_into(self, folder: Path | None) -> None:
        """Let torch write its record of collectives into ``folder`` if NCCL ends this process."""
        if folder is not None and self._lost_rank_seconds is not None:
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / traces.PREFIX))

    def start_watch(
        self, met: tuple[Rendezvous, int] | None, folder: Path | None, replacements: Replacements, trainer: Trainer
    ) -> None:
        """Watch the other ranks and the main thread of a run. ``met``: of `count_run`. ``folder``: for traces."""
        if self._failed is not None:
            self._failed.stop_threads()
        self._watch = self._failed = None
        if self._lost_rank_seconds is None or met is None:
            return
        progress, (at, run) = Progress(lambda: trainer.global_step), met
        loops.follow_actions(replacements, trainer, (progress.begin_action, progress.end_action))
        self._watch = RankWatch(
            at,
            self._lost_rank_seconds,
            run=run,
            folder=folder,
            progress=progress,
            stuck_seconds=self._stuck_seconds,
            exit_process=self._exit_process,
        )
        self._watch.start_threads()

    def report_failure(self, exception: BaseException) -> None:
        """Tell the other ranks of a failure, or name the rank whose failure caused it."""
        watch = self._watch
        if watch is None or isinstance(exception, Preempted):
            return
        self._watch, self._failed = None, watch
        if watch.report_failure(exception) is not None:
            exception.said = True  # type: ignore[attr-defined] # the rank that failed first prints it

    def end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end_run()
