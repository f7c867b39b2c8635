"""Processes under Lightning: their launch, connection and reductions, and their ranks and devices in Lightning."""

import atexit
import os
import subprocess
import time
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard import devices
from lightning_shard.engines.unsharding import unguard_module
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.ranks import reachable
from lightning_shard.tensors.full import full_of

_STARTED_BY = "LIGHTNING_SHARD_STARTED_BY"  # a process that ran the script again for others, in their environment
_LAST_WORDS_SECONDS = 5.0


def init_process_group(environment: ClusterEnvironment, backend: str, **options: Any) -> None:
    """Connect the processes as Lightning does, if they are not connected. All ranks call it. ``options``: torch's."""
    if dist.is_initialized():
        return
    os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
    size = environment.world_size()
    dist.init_process_group(backend, rank=environment.global_rank(), world_size=size, **options)
    if backend == "nccl":
        atexit.register(destroy_at_exit)
    rank_zero_info(f"{size} processes are connected by {backend}.")


def destroy_at_exit() -> None:
    """Destroy the default process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce_tensor(tensor: Any, group: Any, reduce_op: Any, *, skip: bool = False) -> Any:
    """Reduce as Lightning does, also a tensor on the host over a group for devices alone."""
    if skip or not isinstance(tensor, Tensor):
        return tensor
    strategy: Any = None  # DDPStrategy.reduce does not use it
    return DDPStrategy.reduce(strategy, reachable(tensor, group), group, reduce_op).to(tensor.device)


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script again for each other process. With a single process a notebook can run it."""

    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if self.is_interactive_compatible:  # else LOCAL_RANK is set, and a later fit takes its processes as started
            return function(*args, **kwargs)
        os.environ[_STARTED_BY] = str(os.getpid())
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @property
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1


class ChildrenLauncher(MultiProcessingLauncher):
    """Starts all processes as children of this one, whose module gets the full weights at the end of a fit."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        if self._start_method == "fork":
            # Each child would take a smaller group for its own, and train alone.
            refuse_smaller_group(len(self._strategy.parallel_devices or ()))
        return super().launch(*args, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        unguard_module(trainer.lightning_module)  # the process ends, and its module with it
        trainer.lightning_module.register_state_dict_post_hook(_full_tensors)
        return super()._collect_rank_zero_results(trainer, results)


def refuse_smaller_group(size: int) -> None:
    """ConfigurationError: a run of ``size`` processes begins in an earlier run's process group with fewer."""
    if dist.is_initialized() and dist.get_world_size() < size:
        raise ConfigurationError(
            f"The Trainer asks for {size} processes, but this one is in a group of {dist.get_world_size()}, such as "
            "one of an earlier fit with fewer devices. Restart the script or the notebook's kernel, or call "
            "torch.distributed.destroy_process_group(), after which modules that were sharded can't be used any more."
        )


def make_launcher(strategy: Any, start_method: Literal["popen", "spawn", "fork", "forkserver"]) -> Any:
    """The launcher of the other processes of this node, by running the script ("popen") or as children of this one."""
    if start_method != "popen":
        return ChildrenLauncher(strategy, start_method=start_method)
    return ScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)


def share_cores(count: int) -> None:
    """Limit a process that `ScriptLauncher` started to its share of the cores, with ``count`` processes on this node.
    Lightning's launcher sets the threads only of the process that starts the others.
    """
    if os.environ.get(_STARTED_BY, own := str(os.getpid())) != own and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, devices.cores() // count))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def end_silently_behind_parent(error: BaseException) -> None:
    """Exit without a message after an error that the process that started this one raises too, once that has ended: an
    error of this package, or any before they connect.
    """
    own, deadline = str(os.getpid()), time.monotonic() + _LAST_WORDS_SECONDS
    started_by = os.environ.get(_STARTED_BY, own)
    alike = isinstance(error, ShardError) or not dist.is_initialized()
    while alike and started_by != own and time.monotonic() < deadline:
        if str(os.getppid()) != started_by:
            raise SystemExit(1)
        time.sleep(0.1)


def _full_tensors(module: LightningModule, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            state_dict[name] = full_of(value).cpu()  # one at a time on a device


def set_device(module: LightningModule, device: torch.device) -> None:
    """Set ``LightningModule.device``. The engines move the tensors."""
    _update_properties(module, device=device)


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set ``LightningModule.device_mesh`` for ``configure_model``."""
    module._device_mesh = mesh


def set_rank(rank: int) -> None:
    """Tell Lightning's ``rank_zero_*`` helpers which rank this process is."""
    for only in (rank_zero_only, fabric_rank_zero_only):
        vars(only)["rank"] = rank
    if rank:
        # ModelCheckpoint warns on every rank.
        warnings.filterwarnings("ignore", message="The dirpath has changed from")


def take_children(trainer: Any) -> list[subprocess.Popen[bytes]]:
    """Take the processes from Lightning's launcher, whose observer kills this process without a message when one of
    them ends with an exit code. ``trainer`` is None if none was built.
    """
    processes = getattr(getattr(getattr(trainer, "strategy", None), "launcher", None), "procs", None)
    if not isinstance(processes, list):
        return []
    children = [process for process in processes if isinstance(process, subprocess.Popen)]
    processes.clear()
    return children
