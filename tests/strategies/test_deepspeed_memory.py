"""The bytes of ranks under ZeRO by stage, and parameters that are sharded again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import full_tensor
from lightning_shard.callbacks import MemoryCallback
from lightning_shard.engines.zero.config.fields import (
    OptimizerOffload,
    ParameterOffload,
    Stage3Options,
    ZeroBuckets,
    ZeroPlusPlus,
)
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer
from tests.strategies.zero import fit_all


class Attentive(TinyLM):
    """With attention, which reads the weights of a module in it, and without a parameter of its own."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            self.attention = nn.MultiheadAttention(self.width, 2, batch_first=True)
            del self.frozen, self.shift

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.backward_reaches_embedding())
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _gathered_near_the_end_of_backward() -> None:
    found: list[set[str]] = []

    class Watching(Attentive):
        def backward_reaches_embedding(self) -> None:
            # Not when it has ended: DeepSpeed shards all that is left then.
            found.append({n for n, p in self.named_parameters() if p.ds_status.name == "AVAILABLE"})

    strategy = ShardDeepSpeedStrategy(stage=3, stage3=Stage3Options(param_persistence_threshold=0))
    quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=4).fit(Watching(), loader())
    assert len(found) == 4
    # Its input has no gradient that would tell DeepSpeed of the end of its backward.
    assert set().union(*found) <= {"embed.weight"}


def test_stage_3_shards_again_behind_backward() -> None:
    run_distributed(_gathered_near_the_end_of_backward, 2)


def held_in(engines: list[str], precision: str, **strategy: Any) -> dict[str, set[torch.dtype]]:
    """Engine to the dtypes in which gradients waited for the next micro-batch's. Some rank saw each parameter's."""
    trainer = {"accumulate_grad_batches": 2, "max_steps": 1}
    ranks = run_distributed(fit_all, 2, engines, TinyLM, precision, strategy, trainer, timeout=240)
    found: dict[str, set[torch.dtype]] = {}
    for engine in engines:
        ledgers = [rank[engine]["ledger"] for rank in ranks]
        trained = [name for name, entry in ledgers[0].items() if entry.kind == "trainable"]
        columns = [set().union(*(ledger[name].column("accumulated") for ledger in ledgers)) for name in trained]
        assert all(columns), (engine, columns)
        found[engine] = set().union(*columns)
    return found


@pytest.mark.matrix
def test_the_ledger_shows_gradients_held_between_micro_batches() -> None:
    engines = ["zero_1", "zero_2_offload", "zero_3"]
    assert held_in(engines, "bf16-mixed") == {engine: {torch.float32} for engine in engines}
    assert held_in(["zero_2"], "32-true") == {"zero_2": {torch.float32}}
    assert held_in(["zero_3"], "bf16-true", aligned=False) == {"zero_3": {torch.bfloat16}}


def count_bytes(stage: int, offload: bool) -> dict[str, int]:
    """Bytes that this rank holds in live tensors, at the peak of the step."""
    found: dict[str, int] = {}

    class Count(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            optimizers = trainer.strategy.engine.optimizers()
            parameters = [p.ds_tensor if stage == 3 else p for p in module.parameters() if p.requires_grad]
            found["parameters"] = sum(p.numel() * p.element_size() for p in parameters)
            gradients = trainer.strategy.engine.gradients(trainer.optimizers[0])[0]
            found["gradients"] = sum(g.numel() * g.element_size() for g in gradients)
            found["masters"] = sum(group.flat.numel() * group.flat.element_size() for group in optimizers[0].groups)

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            states = [value for slots in trainer.optimizers[0].state.values() for value in slots.values()]
            found["state"] = sum(v.numel() * v.element_size() for v in states if v.ndim > 0)
            found["elements"] = sum(
                full_tensor(trainer, n).numel() for n, p in module.named_parameters() if p.requires_grad
            )

    host = OptimizerOffload(device="cpu") if offload else None
    strategy = ShardDeepSpeedStrategy(
        stage=stage,
        aligned=True,
        offload_optimizer=host,
        buckets=ZeroBuckets(reduce=1000, allgather=1000),
        hooks_use_accessor=True,
    )
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=1, callbacks=[Count()])
    trainer.fit(TinyLM(width=16), loader())
    return found


def check_bytes() -> None:
    ranks = torch.distributed.get_world_size()
    for stage, offload in [(1, False), (2, False), (3, False), (2, True)]:
        found = count_bytes(stage, offload)
        count = found["elements"]
        # A rank's part is padded: stages 1 and 2 once per group, stage 3 once for each of some 20 parameters.
        padding = 32 if stage == 3 else 4
        own = count / ranks
        assert own <= found["masters"] / 4 <= own + padding
        assert found["state"] == 2 * found["masters"]
        assert own <= found["gradients"] / 4 <= own + padding
        if stage == 3:
            assert own <= found["parameters"] / 2 <= own + padding
        else:
            assert found["parameters"] == 2 * count


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_bytes_are_those_of_the_zero_paper(ranks: int) -> None:
    """Per parameter in bf16 with Adam (arXiv 1910.02054, 3.1): 2 bytes of its value, 4 of its fp32 gradient, 4 of its
    master and 8 of moments, each divided by the ranks from the stage on that shards it.
    """
    run_distributed(check_bytes, ranks)


def _look_at_second_copies() -> None:
    found: list[tuple[int, int, int]] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            copied = [p for p in module.parameters() if p.ds_secondary_tensor is not None]
            found.extend((p.ds_numel, p.ds_tensor.numel(), p.ds_secondary_tensor.numel()) for p in copied)

    # On the device, and under offload on the host.
    for place, offload in (("device", None), ("host", ParameterOffload())):
        strategy = ShardDeepSpeedStrategy(
            stage=3,
            zero_plus_plus=ZeroPlusPlus(hpz_partition_size=2),
            # Small parameters would stay gathered, and need no copy.
            stage3=Stage3Options(param_persistence_threshold=0),
            offload_parameters=offload,
        )
        memory = MemoryCallback()
        quiet_trainer(strategy=strategy, max_steps=1, callbacks=[Look(), memory]).fit(TinyLM(), loader())
        assert getattr(memory.predicted, place).parameters == getattr(memory.measured, place).parameters > 0
    assert found
    assert all(shard == -(-full // 4) and second == 2 * shard for full, shard, second in found)


@pytest.mark.matrix
def test_hpz_keeps_a_second_copy_of_the_parameters_that_fewer_ranks_share() -> None:
    run_distributed(_look_at_second_copies, 4)
