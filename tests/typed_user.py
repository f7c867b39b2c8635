"""A user's script with types, as mypy checks it: arguments in every form that constructors take."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_shard import (
    MeshConfig,
    OptimizerOffload,
    PreemptionConfig,
    ShardDDPStrategy,
    ShardDeepSpeedStrategy,
    ShardFSDPStrategy,
    ShardPrecision,
    full_parameters,
)
from lightning_shard.callbacks import MemoryCallback, RunPageCallback, ThroughputCallback


class Model(BoringModel):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with full_parameters(self.trainer, kind="gradient") as gradients:
            self.log("largest", torch.stack([each.abs().max() for each in gradients.values()]).max())


def strategies() -> list[ShardDDPStrategy | ShardDeepSpeedStrategy | ShardFSDPStrategy]:
    return [
        ShardDDPStrategy(aligned=True, nonfinite="skip", preemption={"requeue": "auto"}),
        ShardDDPStrategy(nonfinite={"action": "raise"}, preemption=PreemptionConfig()),
        ShardFSDPStrategy(mesh={"replicate": "auto", "shard": "auto"}, units=["Block", nn.Linear]),
        ShardFSDPStrategy(mesh=MeshConfig(replicate=1), units=[{"modules": "auto", "reshard_after_forward": False}]),
        ShardFSDPStrategy(activation_checkpointing=[nn.Linear], ignored_modules=["Embedding"]),
        ShardDeepSpeedStrategy(stage=3, offload_optimizer={"device": "cpu"}, offload_parameters={"device": "cpu"}),
        ShardDeepSpeedStrategy(stage=2, offload_optimizer=OptimizerOffload(), buckets={"reduce": 1_000_000}),
        ShardDeepSpeedStrategy(stage=3, stage3={"prefetch_bucket_size": 0}, zero_plus_plus={"hpz_partition_size": 2}),
        ShardDeepSpeedStrategy(config={"zero_optimization": {"stage": 1}}),
    ]


def precisions() -> list[ShardPrecision]:
    return [ShardPrecision("16-mixed", loss_scale={"initial": 1024.0}), ShardPrecision("bf16-mixed", reduce="bf16")]


def main() -> None:
    module: LightningModule = Model()
    callbacks = [ThroughputCallback(every_n_steps=10), MemoryCallback(), RunPageCallback()]
    Trainer(strategy=strategies()[2], plugins=precisions()[0], callbacks=callbacks).fit(module)


if __name__ == "__main__":
    main()
