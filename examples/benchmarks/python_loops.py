"""Training without a Trainer: loops by hand over DDP and FSDP2, raw DeepSpeed, and Accelerate."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.benchmarks.llama import Block, Llama
from examples.benchmarks.processes import Place
from examples.benchmarks.workload import Batch, Workload, build_model, build_optimizer, loss_of, parameters_of, stream


class Unavailable(RuntimeError):
    """An engine that does not run here. The message says why."""


class Loop:
    """A training loop that takes as many steps as it is told to."""

    def __init__(self, step: Callable[[Batch], Tensor], work: Workload, place: Place) -> None:
        """``step`` takes an optimizer step on a batch and returns its loss."""
        self.losses: list[Tensor] = []
        self._step = step
        self._batches = stream(work, place.rank, place.device)

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            self.losses.append(self._step(next(self._batches)))

    def end(self) -> None:
        """Nothing to let go of before the process ends."""


# By hand


def replicated(model: Llama, work: Workload, place: Place) -> nn.Module:
    """``model`` under DDP."""
    if work.precision == "32-true":
        return DistributedDataParallel(model, device_ids=None if place.device.type == "cpu" else [place.rank])
    # DistributedDataParallel has no master weights. torch's FSDP2-based replicate is its equal with them.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh(place.device.type, (work.processes,), mesh_dim_names=("replicate",))
    for module in (*model.blocks, model):
        replicate(module, mesh=mesh, mp_policy=work.mp_policy)
    return model


def sharded(
    model: Llama, work: Workload, place: Place, *, grad_op: bool = False, hybrid: bool = False, offload: bool = False
) -> nn.Module:
    """``model`` under FSDP2, one unit for each block."""
    mesh = None
    if hybrid:
        nodes = work.processes // int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (nodes, work.processes // nodes)
        mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if nodes > 1 else mesh["shard"]
    policy = CPUOffloadPolicy(pin_memory=place.device.type != "cpu") if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(
            block, mesh=mesh, reshard_after_forward=not grad_op, mp_policy=work.mp_policy, offload_policy=policy
        )
    return fully_shard(model, mesh=mesh, mp_policy=work.mp_policy, offload_policy=policy)


def by_hand(work: Workload, place: Place, shard: Callable[[Llama, Workload, Place], nn.Module]) -> Loop:
    """The loop of a user of torch."""
    model = shard(build_model(work).to(place.device), work, place)
    optimizer = build_optimizer(work, model.parameters())

    def step(batch: Batch) -> Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = loss_of(work, model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Loop(step, work, place)


# DeepSpeed


def deepspeed_config(work: Workload, stage: int, *, offload: str | None = None) -> dict[str, Any]:
    """A configuration with the workload's dtypes, and buckets that are no larger than the model."""
    elements = parameters_of(work)
    bucket = min(200_000_000 if stage < 3 else 500_000_000, elements + elements % 2)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if work.device != "cpu":
        zero["overlap_comm"] = True  # as stock Lightning's strategy, Hugging Face's files and this package have it
    if offload is not None:
        place: dict[str, Any] = {"device": offload, "pin_memory": work.device != "cpu"}
        if offload == "nvme":
            place["nvme_path"] = tempfile.mkdtemp(prefix="nvme-")
        zero["offload_optimizer"] = dict(place)
        if stage == 3:
            zero["offload_param"] = {**place, **({"buffer_size": bucket} if offload == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": 1,
        # DeepSpeed clips at 1.0 by default.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": work.precision == "bf16-mixed"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def use_process_group(work: Workload, place: Place) -> None:
    """Let DeepSpeed use the process group that is there."""
    # On a CPU DeepSpeed's own way to it compiles a kernel for inference. This package's leaves that out.
    from lightning_shard.engines.zero.connection import connect_deepspeed

    rank, timeout = dist.get_rank() % work.processes, timedelta(minutes=30)
    backend, processes = dist.get_backend(), work.processes
    connect_deepspeed(place.device, backend=backend, local_rank=rank, local_size=processes, timeout=timeout)


def raw_deepspeed(work: Workload, place: Place, *, stage: int, offload: str | None = None) -> Loop:
    """The loop of a user of DeepSpeed."""
    import deepspeed

    use_process_group(work, place)
    config = deepspeed_config(work, stage, offload=offload)
    box = [config]
    dist.broadcast_object_list(box)
    config = box[0]
    model = build_model(work)
    if stage == 3:
        # As from_pretrained and stock Lightning do, so that no rank keeps it whole.
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(work, model.parameters()), config=config)

    def step(batch: Batch) -> Tensor:
        inputs, targets = batch
        loss = loss_of(work, engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Loop(step, work, place)


# Accelerate


def accelerate_fsdp(work: Workload, place: Place, *, grad_op: bool = False, offload: bool = False) -> Loop:
    """The loop of a user of Accelerate, on FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=not grad_op,
        cpu_offload=offload,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=work.mp_policy,
    )
    accelerator = Accelerator(
        cpu=place.device.type == "cpu",
        fsdp_plugin=plugin,
        mixed_precision="bf16" if work.precision == "bf16-mixed" else "no",
    )
    if accelerator.distributed_type != DistributedType.FSDP:
        raise Unavailable(f"Accelerate leaves its FSDP plugin aside if it runs as {accelerator.distributed_type}")
    return _accelerated(accelerator, work, place)


def accelerate_deepspeed(work: Workload, place: Place, *, stage: int, offload: str | None = None) -> Loop:
    """The loop of a user of Accelerate, on DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    use_process_group(work, place)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(work, stage, offload=offload))
    accelerator = Accelerator(
        deepspeed_plugin=plugin, mixed_precision="bf16" if work.precision == "bf16-mixed" else "no"
    )
    return _accelerated(accelerator, work, place)


def _accelerated(accelerator: Any, work: Workload, place: Place) -> Loop:
    model = build_model(work)
    model, optimizer = accelerator.prepare(model, build_optimizer(work, model.parameters()))

    def step(batch: Batch) -> Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = loss_of(work, model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return Loop(step, work, place)


Builder = Callable[[Workload, Place], Loop]

_STAGES: dict[str, dict[str, Any]] = {
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2},
    "stage_3": {"stage": 3},
    "stage_2_offload": {"stage": 2, "offload": "cpu"},
    "stage_3_offload": {"stage": 3, "offload": "cpu"},
    "stage_3_offload_nvme": {"stage": 3, "offload": "nvme"},
}

LOOPS: dict[str, Builder] = {
    "hand_ddp": partial(by_hand, shard=replicated),
    "hand_fsdp": partial(by_hand, shard=sharded),
    "hand_fsdp_grad_op": partial(by_hand, shard=partial(sharded, grad_op=True)),
    "hand_fsdp_hybrid": partial(by_hand, shard=partial(sharded, hybrid=True)),
    "hand_fsdp_offload": partial(by_hand, shard=partial(sharded, offload=True)),
    "accelerate_fsdp": accelerate_fsdp,
    "accelerate_fsdp_grad_op": partial(accelerate_fsdp, grad_op=True),
    "accelerate_fsdp_offload": partial(accelerate_fsdp, offload=True),
    **{f"deepspeed_{name}": partial(raw_deepspeed, **options) for name, options in _STAGES.items()},
    **{f"accelerate_deepspeed_{name}": partial(accelerate_deepspeed, **options) for name, options in _STAGES.items()},
}
"""Every loop without a Trainer, by name."""
