"""What a user can set about sharding changes where tensors lie and when they move, never a number."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_shard import MeshConfig, ShardDDPStrategy, ShardDeepSpeedStrategy, ShardFSDPStrategy
from lightning_shard.errors import ConfigurationError, DataError, MeshError, WrappingError
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

STEPS = 3


class Counting(TinyLM):
    """Counts how often each block's first layer runs in training: twice a step where it is recomputed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.runs: Counter[int] = Counter()
        self.kept = -1

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            # For the meta device.
            block.reset_parameters = partial(_set_scale, block)

    def on_train_start(self) -> None:
        for place, block in enumerate(self.blocks):
            block.up.register_forward_pre_hook(lambda module, args, place=place: self._count(place))
        self.head.register_forward_pre_hook(lambda module, args: self._look())

    def _look(self) -> None:
        # The head comes after the blocks; what is left of the first one's weight after its forward?
        weight = self.blocks[0].up.weight
        self.kept = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0]

    def _count(self, place: int) -> None:
        # The trainer's own question, because a checkpointed forward runs again outside of any step.
        if self.trainer.training:
            self.runs[place] += 1


def _set_scale(block: nn.Module) -> None:
    block.scale.fill_(1.0 + 2.0**-12)


def fit(
    strategy: Any,
    *,
    kind: type[TinyLM] = Counting,
    model: dict[str, Any] | None = None,
    precision: Any = None,
    **trainer: Any,
) -> Any:
    pl.seed_everything(1, verbose=False)
    module = kind(**{"dropout": 0.1, **(model or {})})
    settings = {"max_steps": STEPS, "gradient_clip_val": 0.05, "precision": precision, **trainer}
    quiet_trainer(strategy=strategy, **settings).fit(module, loader())
    assert len(module.losses) == settings["max_steps"] * settings.get("accumulate_grad_batches", 1)
    return module


def check_same(found: TinyLM, expected: TinyLM, what: object) -> None:
    assert found.losses == expected.losses, what
    parameters = whole_parameters(found)
    assert list(parameters) == list(whole_parameters(expected)), what
    wrong = [n for n, p in whole_parameters(expected).items() if not torch.equal(p, parameters[n])]
    assert not wrong, what
    assert list(found.state_dict(keep_vars=True)) == list(expected.state_dict(keep_vars=True)), what


# Every setting against the plain one, bit by bit. Dropout is on: recomputation must draw the same numbers.


class CountedGather:
    """An all-gather of the user's own; `made` counts the calls of all its objects."""

    made = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        type(self).made += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


SAME: list[dict[str, Any]] = [
    {"units": ["Block"]},
    {"units": ["Block", "Linear"]},
    {"units": []},
    {"units": 900},
    {"units": 1},
    {"reshard_after_forward": False},
    {"cpu_offload": True},
    {"forward_prefetch": 1, "backward_prefetch": 1},
    {"forward_prefetch": 9, "backward_prefetch": 9},
    {"units": ["Block", "Linear"], "forward_prefetch": 2, "backward_prefetch": 3, "reshard_after_forward": False},
    {"activation_checkpointing": "units"},
    {"activation_checkpointing": ["Block"]},
    {"activation_checkpointing": ["Block", "Linear"]},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "offload", "reshard_after_forward": False},
    {"activation_checkpointing": "units", "cpu_offload": True, "units": 900},
    {"activation_checkpointing": "units", "reshard_after_forward": False, "backward_prefetch": 2},
    {"mesh": MeshConfig(replicate=2)},
    {"separate_reduce_scatter": True, "custom_all_gather": CountedGather()},
    {"log_grad_norm": True, "error_if_nonfinite": True},
]

RUNS = {
    "units": {0: 2, 1: 2, 2: 2},
    "offload": {0: 2, 1: 2, 2: 2},
    2: {0: 2, 1: 1, 2: 2},
    None: {0: 1, 1: 1, 2: 1},
}


def _check_settings(cases: list[dict[str, Any]], model: dict[str, Any], precision: str) -> None:
    expected = fit(ShardFSDPStrategy(), model=model, precision=precision)
    for case in cases:
        found = fit(ShardFSDPStrategy(**case), model=model, precision=precision)
        check_same(found, expected, case)
        check_runs(found, case.get("activation_checkpointing"), case)
        assert bool(CountedGather.made) == ("custom_all_gather" in case), case
        CountedGather.made = 0
        # 37 rows over two ranks; with no units the root has all, and keeps it.
        whole = not case.get("reshard_after_forward", True) or case.get("units") == [] or "mesh" in case
        assert found.kept in ({37} if whole else {18, 19}), case
        for unit in (m for m in found.modules() if isinstance(m, FSDPModule)):
            if (group := unit._get_fsdp_state()._fsdp_param_group) is not None:
                apart = group._reduce_scatter_process_group is not group.mesh_info.shard_process_group
                assert apart == case.get("separate_reduce_scatter", False), case


def check_runs(found: Counting, setting: Any, what: object) -> None:
    per_step = RUNS["units" if isinstance(setting, list | str) else setting]
    assert {place: runs / STEPS for place, runs in found.runs.items()} == per_step, what


def test_settings_do_not_change_a_bit() -> None:
    run_distributed(_check_settings, 2, SAME[1::6], {}, "bf16-mixed")


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", [{}, {"tie": True}, {"dtype": torch.bfloat16}, {"meta": True}])
def test_no_setting_changes_a_bit_in_any_precision(model: dict[str, Any], precision: str) -> None:
    run_distributed(_check_settings, 2, SAME, model, precision, timeout=600)


def _check_four() -> None:
    expected = fit(ShardFSDPStrategy())
    for case in [{"reshard_after_forward": 2}, {"reshard_after_forward": False}, {"activation_checkpointing": "units"}]:
        found = fit(ShardFSDPStrategy(**case))
        check_same(found, expected, case)
        rows = {2: (19, 18), False: (37, 37)}.get(case.get("reshard_after_forward", True), (10, 10, 10, 7))
        assert found.kept == rows[dist.get_rank() % len(rows)], case
    # With more than two terms the order of a sum follows from how a unit's gradients are cut, so from the units.
    small = fit(ShardFSDPStrategy(units=1))
    check_same(fit(ShardFSDPStrategy(units=1, reshard_after_forward=2, forward_prefetch=2)), small, "small units")
    hybrid = fit(ShardFSDPStrategy(mesh=MeshConfig(replicate=2)))
    assert hybrid.shift.placements == (Replicate(), Shard(0))
    for case in [{"activation_checkpointing": "units"}, {"cpu_offload": True}, {"reshard_after_forward": False}]:
        check_same(fit(ShardFSDPStrategy(mesh=MeshConfig(replicate=2), **case)), hybrid, case)


@pytest.mark.matrix
def test_settings_on_four_processes() -> None:
    run_distributed(_check_four, 4, timeout=300)


def _check_checkpointed_replicas() -> None:
    for strategy in (ShardDDPStrategy, partial(ShardDeepSpeedStrategy, stage=1)):
        expected = fit(strategy())
        for setting in ("units", "selective", "offload", 2, ["Block"]):
            found = fit(strategy(activation_checkpointing=setting))
            check_same(found, expected, setting)
            check_runs(found, setting, setting)


@pytest.mark.matrix
def test_checkpointing_changes_no_bit_of_replicas() -> None:
    run_distributed(_check_checkpointed_replicas, 2, timeout=300)


# Where the tensors lie.


# What can't work is refused, on all ranks alike.

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reshard_after_forward": 3}, MeshError, "reshard_after_forward is 3.*shard axis' size 4"),
    ({"reshard_after_forward": 2, "mesh": MeshConfig(replicate=2)}, MeshError, "shard axis' size 2"),
    ({"mesh": MeshConfig(shard=3)}, MeshError, "mesh.shard: 3 do not multiply to the 4 processes"),
    ({"mesh": MeshConfig(replicate="auto", shard=3)}, MeshError, "do not multiply to the 4 processes"),
    ({"symmetric_memory": True}, ConfigurationError, "symmetric_memory is true, but only NCCL has it.*on cpu"),
    ({"units": ["Blok"]}, WrappingError, r"'Blok'.*Block \(x3\)"),
    ({"activation_checkpointing": ["Blok"]}, WrappingError, "activation_checkpointing names 'Blok'.*Block"),
    ({"activation_checkpointing": 0}, WrappingError, "activation_checkpointing is 0"),
    ({"activation_checkpointing": "units", "units": []}, WrappingError, "none below its root"),
    ({"compile": True, "units": []}, WrappingError, "compile goes by shard units, but the model has none"),
    ({"ignored_modules": ["Blok", "Block"]}, WrappingError, "ignored_modules names 'Blok'.*LayerNorm"),
]


def _check_refusals(cases: list[tuple[dict[str, Any], type[Exception], str]]) -> None:
    for settings, kind, message in cases:
        with pytest.raises(kind, match=message):
            fit(ShardFSDPStrategy(**settings))
    # The ranks are still together; shards of fewer ranks stand in the module between forward and backward.
    fit(ShardFSDPStrategy(reshard_after_forward=2), max_steps=1)


def test_settings_that_cannot_work() -> None:
    run_distributed(_check_refusals, 4, REFUSED)


@pytest.mark.parametrize(
    "settings", [{"custom_all_gather": len}, {"custom_all_gather": CountedGather(), "symmetric_memory": True}]
)
def test_an_all_gather_has_torchs_interface(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be an object that can be called and has `allocate`"):
        ShardFSDPStrategy(**settings)


def test_prefetch_depths_are_counts() -> None:
    with pytest.raises(ConfigurationError, match="forward_prefetch is -1"):
        ShardFSDPStrategy(forward_prefetch=-1)


class Exploding(TinyLM):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.inf if batch_idx == 1 and self.global_rank == 1 else 1.0)


def _check_explosion() -> None:
    pl.seed_everything(1, verbose=False)
    module, strategy = Exploding(), ShardFSDPStrategy(error_if_nonfinite=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=4, gradient_clip_val=1.0)
    with pytest.raises(DataError, match=r"The gradient norm is (inf|nan)"):
        trainer.fit(module, loader())
    assert trainer.global_step == 1
    assert all(p.isfinite().all() for p in whole_parameters(module).values())


def test_an_explosion_on_one_rank_stops_all_before_the_step() -> None:
    run_distributed(_check_explosion, 2)
