"""Every engine on one CUDA device, and on all that there are. Run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from examples.benchmarks.processes import run_processes
from lightning_shard.callbacks.memory_report import MemoryCallback
from lightning_shard.callbacks.profiler import ProfilerCallback
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.checkpoint.background import HostBuffers
from tests.models import TinyLM, loader
from tests.strategies import on_devices
from tests.strategies.on_devices import HYBRID

pytestmark = pytest.mark.gpu

NAMES = [
    "shard_ddp_aligned",
    "shard_fsdp_grad_op_aligned",
    "shard_fsdp_offload_aligned",
    "shard_deepspeed_stage_1_aligned",
    "shard_deepspeed_stage_2_aligned",
    "shard_deepspeed_stage_2_offload_aligned",
    "shard_deepspeed_stage_3_aligned",
    "shard_deepspeed_stage_3_offload_aligned",
]


@pytest.fixture(autouse=True)
def _own_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # DeepSpeed's JIT builds and deterministic cuBLAS.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_copies_of_device_memory_are_pinned_and_whole_at_once() -> None:
    tensors = {f"w{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(4)}
    boxes, buffers = [MetadataIndex(name, (0,)) for name in tensors], HostBuffers()
    buffers.copy(boxes, lambda index: tensors[index.fqn])
    buffers.pin()  # as the thread of the first save does
    values = buffers.copy(boxes, lambda index: tensors[index.fqn])
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    for i, index in enumerate(boxes):
        assert values(index).is_pinned()
        assert values(index).eq(i).all()


@pytest.mark.parametrize("name", NAMES)
def test_meters(name: str, tmp_path: Path) -> None:
    throughput, memory = ThroughputCallback(every_n_steps=2, peak_tflops=100.0), MemoryCallback()
    profiler = ProfilerCallback(steps=[3, 4], snapshots=True, folder=str(tmp_path))
    callbacks = [throughput, memory, profiler]
    options = {"accelerator": "gpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_steps": 6}
    trainer = pl.Trainer(strategy=name, precision="bf16-mixed", callbacks=callbacks, **options)
    trainer.fit(TinyLM(width=256), loader())
    window = throughput.windows[-1]
    assert window.mfu is not None
    assert 0 < window.mfu < 1
    # What was counted can't be more than torch's allocator gave away, but for what is not its own.
    assert memory.measured is not None
    assert 0 < memory.measured.device.total - memory.measured.device.communication <= window.allocated
    assert window.allocated <= window.reserved
    assert sorted(path.name for path in profiler.files) == ["rank0-steps3-4.json.gz", "rank0-steps3-4.pickle"]


# In processes of their own, one for each device


def _on(devices: int) -> dict[str, Any]:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    return {"processes": devices, "device": "cuda", "timeout": 900.0}


OFFLOADS = [name for name in NAMES if "offload" in name]
# Of a tensor's largest element: sums in another order over more than two ranks, steps on the host of those offloaded.
TOLERANCE = 2e-5


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_devices_train_alike(devices: int, precision: str) -> None:
    names = [*NAMES, HYBRID]
    for found in run_processes(on_devices.alike, names, precision, "clipped", {}, **_on(devices)):
        far = {name: value for name, value in found.items() if value > (TOLERANCE if devices > 2 else 0)}
        assert {name: value for name, value in far.items() if value > TOLERANCE or name not in OFFLOADS} == {}


@pytest.mark.parametrize("name", ["shard_fsdp", "shard_deepspeed_stage_2", "shard_deepspeed_stage_3"])
def test_the_second_device_alone(name: str, tmp_path: Path) -> None:
    _on(2)
    before = torch.cuda.memory_allocated(0)
    trainer = pl.Trainer(
        strategy=name, accelerator="gpu", devices=[1], max_steps=3, logger=False, default_root_dir=tmp_path
    )
    trainer.fit(TinyLM(), loader())
    assert trainer.strategy.root_device == torch.device("cuda", 1)
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", ["wide, accumulated and clipped", "wide, by hand"])
def test_offloaded_gradients_of_100_megabytes_are_waited_for(case: str, devices: int) -> None:
    model = {"rows": 102_400, "width": 256, **({"every": 2} if "hand" in case else {})}
    for found in run_processes(on_devices.alike, OFFLOADS, "bf16-mixed", case, model, **_on(devices)):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", ["running statistics and a scalar", "a stream"])
def test_statistics_scalars_and_streams(case: str, devices: int) -> None:
    names = ["shard_fsdp_offload_aligned", "shard_ddp_aligned", "shard_deepspeed_stage_2_aligned"]
    for found in run_processes(on_devices.alike, names, "bf16-mixed", case, {}, **_on(devices)):
        assert max(found.values()) <= TOLERANCE, found


# DeepSpeed's own steps wait; the table of waits has them.
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_fsdp_grad_op", "shard_fsdp_aligned"])
def test_steady_steps_do_not_wait(name: str, precision: str, devices: int) -> None:
    assert run_processes(on_devices.steady, name, precision, **_on(devices)) == [3] * devices


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1", "shard_deepspeed_stage_3"])
def test_saves_in_the_background_have_what_saves_have_that_are_waited_for(
    name: str, devices: int, tmp_path: Path
) -> None:
    assert run_processes(on_devices.saves, name, str(tmp_path), **_on(devices)) == [[]] * devices


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["shard_ddp", "shard_fsdp", "shard_deepspeed_stage_1", "shard_deepspeed_stage_3"])
def test_runs_go_on_with_dropout_and_a_fused_optimizer(name: str, devices: int, precision: str, tmp_path: Path) -> None:
    assert run_processes(on_devices.resumed, name, precision, str(tmp_path), **_on(devices)) == [0.0] * devices
