"""The check of untested versions: engines equal a plain loop, and a fault in the arithmetic is told and refused."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import PrecisionContractError, versions
from lightning_shard.engines import self_check, sharding
from lightning_shard.engines.engine import Engine, PlannedRun, Run
from lightning_shard.engines.fully_shard import FSDPOptions, FullyShard
from lightning_shard.engines.torch_ddp import DDPOptions, TorchDDP
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.engines.zero.config.zero_settings import read_settings
from lightning_shard.engines.zero.connection import connect_deepspeed
from lightning_shard.engines.zero.zero_engine import ZeroEngine
from lightning_shard.mesh import build_mesh
from lightning_shard.precision.policy import policy_from
from tests.engines.test_engine import CPU, ENGINES, SHARDED
from tests.groups import sampled
from tests.harness import run_distributed


def _difference(make: Callable[[], Engine], precision: str) -> str:
    ranks, engine = dist.get_world_size(), make()
    policy = policy_from(precision, aligned=True)
    planned = PlannedRun(ranks=ranks, per_node=ranks, policy=policy, aligned=True, device_type="cpu")
    seconds = timedelta(minutes=1)
    connection = connect_deepspeed(CPU, backend="gloo", local_rank=dist.get_rank(), local_size=ranks, timeout=seconds)
    shards = ranks if isinstance(engine, FullyShard | ZeroEngine) else 1
    mesh = build_mesh((ranks // shards, shards), device_type="cpu")
    try:
        run = Run(planned=planned, device=CPU, mesh=mesh, seed=1, fitting=True)
        return self_check.numeric_difference(engine, run)
    finally:
        connection.disconnect()


def _compressed_ddp() -> Engine:
    return TorchDDP(DDPOptions(comm_hook="fp16_compress"), ForwardOptions(), at_boundary=True)


def _compressed_zero() -> Engine:
    settings = read_settings(DeepSpeedFields(stage=2, communication_data_type="bf16"), aligned=False, problems=[])
    return ZeroEngine(settings, ForwardOptions(), mesh=SHARDED)


class Compressed(FullyShard):
    def policy(self, base: Any, *, loss_scale_given: bool) -> Any:
        return replace(base, reduce=torch.bfloat16, accumulate=torch.bfloat16)


def _compressed_fsdp() -> Engine:
    return Compressed(FSDPOptions(mesh=SHARDED), ForwardOptions(), at_boundary=True)


CHECKED = [("torch_ddp", "32-true"), *((name, "bf16-mixed") for name in ENGINES if name != "torch_ddp")]
FAULTS = [(_compressed_ddp, "32-true"), (_compressed_zero, "bf16-mixed"), (_compressed_fsdp, "bf16-mixed")]


def _differences() -> tuple[list[str], list[str]]:
    faults = FAULTS if dist.get_world_size() == 2 else []
    return [_difference(ENGINES[name], precision) for name, precision in CHECKED], [_difference(*f) for f in faults]


@pytest.mark.parametrize("ranks", sampled([1, 2, 3], 1))
def test_engines_equal_a_plain_loop_and_a_reduction_in_16_bits_is_told(ranks: int) -> None:
    for found, faults in run_distributed(_differences, ranks):
        assert dict(zip(CHECKED, found, strict=True)) == dict.fromkeys(CHECKED, "")
        assert all(text.startswith("units.") for text in faults), faults


def _fit(strategy: str, precision: str = "bf16-mixed") -> tuple[str, int]:
    """The line about versions, and the number of steps."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 1, "precision": precision}
    trainer = pl.Trainer(strategy=strategy, **given, **dict.fromkeys(off, False))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(BoringModel())
        except PrecisionContractError as error:
            lines.append(str(error))
    lines += [str(warning.message) for warning in warned]
    return next((line for line in lines if "than the versions" in line), ""), trainer.global_step


def _fits() -> list[tuple[str, int]]:
    made = sharding.MixedPrecisionPolicy
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(versions.TESTED, "torch", ("2.0.0", "2.1.0"))
        fine = [_fit("shard_fsdp_aligned"), _fit("shard_fsdp_aligned")]
        reduced = {"reduce_dtype": torch.bfloat16}
        patch.setattr(sharding, "MixedPrecisionPolicy", lambda **given: made(**{**given, **reduced}))
        return [*fine, _fit("shard_fsdp_grad_op", "bf16-true"), _fit("shard_ddp_aligned")]


def test_a_fit_on_an_untested_version_checks_the_numbers_once() -> None:
    (passed, steps), (again, _), (warned, went_on), (refused, none) = run_distributed(_fits, 2)[0]
    assert "were checked against a plain loop, and are equal" in passed
    assert steps == went_on == 1
    assert again == "", "once in a process"
    assert "ShardFSDPStrategy in precision 'bf16-true' differs from a plain loop over the same data: units." in warned
    version = torch.__version__.partition("+")[0]
    assert re.match(rf"torch {re.escape(version)}\S* is newer than", refused)
    assert "aligned: true holds equal numbers. Install torch 2.0.0 to 2.1.0, or a newer lightning_shard." in refused
    assert none == 0
