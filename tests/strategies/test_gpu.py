"""Every engine on one CUDA device. Run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_shard.callbacks.memory import MemoryCallback
from lightning_shard.callbacks.profiler import ProfilerCallback
from lightning_shard.callbacks.throughput import ThroughputCallback
from lightning_shard.checkpoint.background import HostBuffers
from tests.models import Final, TinyLM, loader

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


def fit(name: str, precision: str, folder: Path, **kwargs: Any) -> tuple[dict[str, Tensor], list[float]]:
    pl.seed_everything(1, verbose=False)
    module, final = TinyLM(), Final()
    trainer = pl.Trainer(
        strategy=name,
        accelerator="gpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        limit_train_batches=10,
        gradient_clip_val=0.05,
        callbacks=[final],
    )
    trainer.fit(module, loader(), **kwargs)
    assert trainer.strategy.root_device.type == "cuda"
    trainer.save_checkpoint(folder / f"{name}.ckpt", weights_only=True)
    return {key: value.cpu() for key, value in final.parameters.items()}, module.losses


def test_copies_of_device_memory_are_pinned_and_whole_at_once() -> None:
    tensors = {f"w{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(4)}
    boxes, buffers = [MetadataIndex(name, (0,)) for name in tensors], HostBuffers()
    values = buffers.copy(boxes, lambda index: tensors[index.fqn])
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    for i, index in enumerate(boxes):
        assert values(index).is_pinned()
        assert values(index).eq(i).all()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_fsdp_does(name: str, precision: str, tmp_path: Path) -> None:
    expected, losses = fit("shard_fsdp_aligned", precision, tmp_path)
    found, own = fit(name, precision, tmp_path)
    assert own[0] == losses[0]
    for key, value in expected.items():
        # Offloaded optimizers step on the host, whose fp32 roots and divisions may round otherwise: an fp32 spacing
        # per step of 1e-2.
        atol = 1e-6 if "offload" in name else 0.0
        torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_meters(name: str, tmp_path: Path) -> None:
    throughput, memory = ThroughputCallback(every_n_steps=2, peak_tflops=100.0), MemoryCallback()
    profiler = ProfilerCallback(steps=[3, 4], snapshots=True, folder=str(tmp_path))
    trainer = pl.Trainer(
        strategy=name,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=6,
        callbacks=[throughput, memory, profiler],
    )
    trainer.fit(TinyLM(width=256), loader())
    window = throughput.windows[-1]
    assert window.mfu is not None
    assert 0 < window.mfu < 1
    # What was counted can't be more than torch's allocator gave away, but for what is not its own.
    assert memory.measured is not None
    assert 0 < memory.measured.device.total - memory.measured.device.communication <= window.allocated
    assert window.allocated <= window.reserved
    assert sorted(path.name for path in profiler.files) == ["rank0-steps3-4.json.gz", "rank0-steps3-4.pickle"]
