"""Connect DeepSpeed to the process group. Its changes of the process are undone after a run."""

import inspect
import logging
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from lightning_shard.engines.zero.internals import require_internals
from lightning_shard.versions import TESTED, version_numbers


def refuse_older_version() -> None:
    """Refuse a DeepSpeed that is missing or older than the tested ones (ImportError). A newer one may run."""
    import deepspeed

    lowest = TESTED["deepspeed"][0]
    if version_numbers(deepspeed.__version__) < version_numbers(lowest):
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} is installed, but lightning_shard needs {lowest} or newer: "
            f"pip install 'deepspeed>={lowest}'"
        )


@dataclass(frozen=True)
class Connection:
    """The state of the process before DeepSpeed changed it."""

    functions: Mapping[str, Any]  # Of ``torch.nn.functional``.
    others: ExitStack

    def restore_functions(self) -> None:
        """Restore ``torch.nn.functional``, in which ``zero.Init`` leaves functions that round otherwise."""
        vars(functional).update(self.functions)

    def disconnect(self) -> None:
        self.restore_functions()
        self.others.close()


def connect_deepspeed(
    device: torch.device, *, backend: str, local_rank: int, local_size: int, timeout: timedelta
) -> Connection:
    """Let DeepSpeed use the existing process group of ``backend``, and drop its globals of an earlier one. All ranks
    call it. ``device`` decides DeepSpeed's accelerator. ``local_size`` is the number of devices that it sees on a CPU,
    ``timeout`` for groups that it makes.
    """
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups, logger

    require_internals()
    functions, others = {name: getattr(functional, name) for name in ("linear", "embedding")}, ExitStack()
    others.callback(logger.setLevel, logger.level)
    others.callback(os.environ.update, {name: os.environ[name] for name in _VARIABLES if name in os.environ})
    for name in _VARIABLES:
        others.callback(os.environ.pop, name, None)
    # Stage 3 appends each module, and never removes one.
    stack = parameter_offload.FWD_MODULE_STACK
    others.callback(stack.__delitem__, slice(len(stack), None))
    others.callback(_forget_releases)
    # An engine with DeepSpeed's autocast leaves this set, and all later engines would reduce in its dtype.
    others.callback(setattr, torch_autocast, "TORCH_AUTOCAST_INITIALIZED", torch_autocast.TORCH_AUTOCAST_INITIALIZED)
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    engine: Any = deepspeed.DeepSpeedEngine
    others.callback(setattr, engine, "_broadcast_model", engine._broadcast_model)
    others.callback(lambda: vars(comm.cdb).pop("new_group", None))
    # `prepare_replica` made the ranks equal. DeepSpeed's broadcast fails for 0-d parameters.
    engine._broadcast_model = lambda engine: None
    # DeepSpeed logs every buffer that it makes.
    logger.setLevel(logging.WARNING)
    os.environ["LOCAL_SIZE"] = str(local_size)
    # DeepSpeed reads it again and again, and Lightning takes it for the local rank.
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    _choose_accelerator(device)
    if getattr(comm, "cdb", None) is not None and _connected.get("group") is not dist.group.WORLD:
        groups._release_process_group_references()
        comm.cdb = None
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    _connected["group"] = dist.group.WORLD
    comm.cdb.new_group = partial(dist.new_group, timeout=timeout)
    return Connection(functions, others)


def existing_hpz_group(size: int) -> dist.ProcessGroup | None:
    """The group of ``size`` ranks that an earlier run made for hpZ: DeepSpeed asserts that it makes one."""
    from deepspeed.utils import groups

    group: dist.ProcessGroup | None = groups._get_zero_param_intra_parallel_group()
    if group is not None and dist.get_world_size(group) != size:
        groups._release_process_group_references(group)
        return None
    return group


@contextmanager
def synced_generation(config: Mapping[str, Any]) -> Generator[None, None, None]:
    """Let ``generate`` of transformers run on until all ranks are done. Its ``synced_gpus`` is true by default if it is
    shown a ``config`` of stage 3. Not in training: LayerDrop would drop no layer then.
    """
    known = sys.modules.get("transformers.integrations.deepspeed")
    if known is None or known.is_deepspeed_zero3_enabled():
        yield
        return
    # Stands for ``transformers.integrations.HfDeepSpeedConfig``, which needs accelerate. transformers holds it weakly.
    shown = type("Shown", (), {"config": config, "is_zero3": lambda self: True})()
    known.set_hf_deepspeed_config(shown)
    try:
        yield
    finally:
        known.unset_hf_deepspeed_config()


_VARIABLES = ("LOCAL_SIZE", "LOCAL_RANK")

_connected: dict[str, object] = {}  # The process group that DeepSpeed's globals belong to.


def _choose_accelerator(device: torch.device) -> None:
    from deepspeed import accelerator

    current = accelerator.get_accelerator()
    if not getattr(current, "chosen_here", False) or current.device_name() != device.type:
        accelerator.set_accelerator(_cpu_accelerator() if device.type == "cpu" else _cuda_accelerator())


def _cuda_accelerator() -> Any:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    class CUDA(CUDA_Accelerator):
        chosen_here = True

        def device_name(self, device_index: int | str | None = None) -> str:
            # Text is LOCAL_RANK, which DeepSpeed takes for the index of this process' device
            # (zero/partition_parameters.py, zero/utils.py).
            return super().device_name(self.current_device() if isinstance(device_index, str) else device_index)

    return CUDA()


def _cpu_accelerator() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class CPU(CPU_Accelerator):
        chosen_here = True

        def is_fp16_supported(self) -> bool:
            # DeepSpeed requires fp16 instructions. torch computes without them, only slower.
            return True

        def create_op_builder(self, class_name: str) -> Any:
            # DeepSpeed compiles it for each backend, and uses it for inference alone.
            return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    return CPU()


def _forget_releases() -> None:
    """Empty the cache of parameters that stage 3 releases after each module. It would keep every run alive."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    decorated = vars(Coordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()
