"""Training with a Trainer: stock Lightning's strategies and this package's, stopped between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import lightning_shard  # noqa: F401  (registers the strategies)
from examples.benchmarks.llama import Block
from examples.benchmarks.processes import Place
from examples.benchmarks.python_loops import deepspeed_config, sharded
from examples.benchmarks.workload import Batch, Workload, build_loader, build_model, build_optimizer, loss_of
from lightning_shard.registry import build

ACCELERATORS: dict[str, Any] = {"cuda": "gpu"}
"""The Trainer's accelerator for a kind of device."""


class Task(LightningModule):
    """The workload as a LightningModule."""

    def __init__(
        self, work: Workload, place: Place, shard: Callable[..., Any] | None = None, *, plain: bool = False
    ) -> None:
        """Build the model.

        Args:
            work: the task.
            place: rank and device.
            shard: the user's part of ``configure_model``, if the strategy leaves sharding to the user.
            plain: the strategy checkpoints and compiles.
        """
        super().__init__()
        self.work, self.place, self.shard = work, place, shard
        self.model = build_model(work, plain=plain)
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Shard once, if the user has to."""
        if self.shard is not None:
            self.shard(self.model, self.work, self.place)
            self.shard = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, logged."""
        inputs, targets = batch
        loss = loss_of(self.work, self.model(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The loss on a batch that is not learned from."""
        inputs, targets = batch
        self.log("val_loss", loss_of(self.work, self.model(inputs), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The workload's."""
        return build_optimizer(self.work, self.parameters())


class Pause(Callback):
    """Hands over to the greenlet that runs the benchmark, before every batch that it has not asked for."""

    left = 0
    resumed: Callable[[], object] | None = None
    """Called once in the fit, ahead of the next step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Wait for the next block of steps."""
        from greenlet import getcurrent

        if self.left == 0:
            getcurrent().parent.switch()
        self.left -= 1
        if self.resumed is not None:
            self.resumed()
            self.resumed = None


class TrainerLoop:
    """A fit that takes as many steps as it is told to.

    It runs in a greenlet: a stack of its own in the same thread. A block of steps is everything between the starts of
    two batches: hooks, logging and data loading are in.
    """

    def __init__(
        self, name: str, work: Workload, place: Place, *, steps: int, task: type[Task] = Task, **options: Any
    ) -> None:
        """Set up the fit, up to its first batch.

        Args:
            name: of `STOCK`, or of a strategy of this package.
            work: the task.
            place: rank and device.
            steps: their number.
            task: the LightningModule.
            **options: more for the Trainer.
        """
        from greenlet import greenlet

        strategy, precision, shard = STOCK[name](work) if name in STOCK else (name, work.precision, None)
        plain = name not in STOCK
        if plain:
            strategy = build(name, compile=work.compile, activation_checkpointing=work.checkpointing)
        self.task = task(work, place, shard, plain=plain)
        self._pause = Pause()
        arguments = {
            "accelerator": ACCELERATORS.get(work.device, "cpu"),
            "devices": work.processes,
            "strategy": strategy,
            "precision": precision,
            "max_steps": steps + 1,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "callbacks": [self._pause],
        }
        self.trainer = Trainer(**{**arguments, **options})
        loaders = [build_loader(work, place.rank) for _ in ("train", "validation")]
        self._fit = greenlet(lambda: self.trainer.fit(self.task, *loaders))
        self._fit.switch()

    @property
    def losses(self) -> list[Tensor]:
        """Those of the steps so far."""
        return self.task.losses

    def run(self, steps: int) -> None:
        """Take steps."""
        self._pause.left = steps
        self._fit.switch()

    def before_step(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the fit, which has a stack of its own, ahead of the next step."""
        self._pause.resumed = function

    def end(self) -> None:
        """Let the fit end after one step more."""
        while not self._fit.dead:
            self.run(1)


Parts = tuple[Any, str, Callable[..., Any] | None]


def _ddp(work: Workload) -> Parts:
    return "ddp", work.precision, None


def _model_parallel(**options: Any) -> Callable[[Workload], Parts]:
    def parts(work: Workload) -> Parts:
        from functools import partial

        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=work.processes, tensor_parallel_size=1)
        # fully_shard sets the dtypes.
        return strategy, "32-true", partial(sharded, **options)

    return parts


def _fsdp(sharding: str, *, offload: bool = False) -> Callable[[Workload], Parts]:
    def parts(work: Workload) -> Parts:
        from lightning.pytorch.strategies import FSDPStrategy
        from torch.distributed.fsdp import MixedPrecision

        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        strategy = FSDPStrategy(
            auto_wrap_policy={Block},
            sharding_strategy=sharding,
            cpu_offload=offload,
            mixed_precision=mixed if work.precision == "bf16-mixed" else None,
        )
        # Lightning's own bf16-mixed would lay autocast over it.
        return strategy, "32-true", None

    return parts


def _deepspeed(stage: int, offload: str | None = None) -> Callable[[Workload], Parts]:
    def parts(work: Workload) -> Parts:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        config = deepspeed_config(work, stage, offload=offload)
        return DeepSpeedStrategy(config=config), work.precision, None

    return parts


STOCK: dict[str, Callable[[Workload], Parts]] = {
    "lightning_ddp": _ddp,
    "lightning_model_parallel": _model_parallel(),
    "lightning_model_parallel_grad_op": _model_parallel(grad_op=True),
    "lightning_model_parallel_hybrid": _model_parallel(hybrid=True),
    "lightning_model_parallel_offload": _model_parallel(offload=True),
    "lightning_fsdp": _fsdp("FULL_SHARD"),
    "lightning_fsdp_grad_op": _fsdp("SHARD_GRAD_OP"),
    "lightning_fsdp_offload": _fsdp("FULL_SHARD", offload=True),
    "lightning_deepspeed_stage_1": _deepspeed(1),
    "lightning_deepspeed_stage_2": _deepspeed(2),
    "lightning_deepspeed_stage_3": _deepspeed(3),
    "lightning_deepspeed_stage_2_offload": _deepspeed(2, "cpu"),
    "lightning_deepspeed_stage_3_offload": _deepspeed(3, "cpu"),
}
"""Stock Lightning's strategies: strategy, precision, and the user's part of ``configure_model``."""
