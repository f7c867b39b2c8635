"""Print a rank's memory: predicted when a fit starts, counted after its first step, and in out-of-memory errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard._lightning.messages import print_above_bar
from lightning_shard.arguments import checked
from lightning_shard.engines.memory_breakdown import module_tensors
from lightning_shard.memory import MemoryAccount, most
from lightning_shard.meters import memory_account as tables
from lightning_shard.meters.memory_account import StepMeter
from lightning_shard.meters.throughput_windows import peak_bytes, size_text
from lightning_shard.ranks import Ranks


class StepMeterCallback(Callback):
    """Calls a `StepMeter` that watches a forward pass before backward and before the optimizer's step."""

    _meter: StepMeter | None = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._meter is not None:
            self._meter.count_saved()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.count_resident()


class MemoryCallback(StepMeterCallback):
    """Prints the bytes per rank of parameters, masters, gradients, optimizer state, activations and buffers.

    The table after the first optimizer step shows the rank with the most bytes, counted on live tensors during that
    step, next to the bytes that were predicted by arithmetic, without activations, when the fit started. Counting is
    the same on every engine, and later steps cost nothing. When memory runs out in the fit, the error's message gets
    the table and settings that would hold less.

    Attributes:
        predicted: predicted account of a step on the fullest rank, None under other strategies and for modules that
            were sharded before the run.
        measured: this rank's account of the first step, None before it.
        ranks: all ranks' measured accounts, on every rank.
    """

    @checked("MemoryCallback")
    def __init__(self, activations: bool = True) -> None:
        """Set up the measurement.

        Args:
            activations: count the tensors that autograd saves in the first step. Turn it off if other code needs hooks
                on saved tensors.
        """
        self.activations = activations
        self.predicted: MemoryAccount | None = None
        self.measured: MemoryAccount | None = None
        self.ranks: list[MemoryAccount] = []
        self._started = False

    def before_sharding(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the module's parameters while they are full. This package's strategies call it."""
        self._predicting(trainer, lambda memory: memory.note_module())

    def _predicting(self, trainer: Trainer, ask: Callable[[Any], Any]) -> Any:
        """Ask the memory of this package's strategies. A failed prediction does not end the run."""
        try:
            return None if (memory := _memory(trainer)) is None else ask(memory)
        except Exception as error:
            rank_zero_info(f"MemoryCallback: no prediction ({type(error).__name__}: {error}).")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.measured, self.ranks = None, []
        self.predicted = self._predicting(trainer, lambda memory: memory.predicted(trainer.optimizers))
        if (memory := _memory(trainer)) is not None:
            self._meter = memory.step_meter()
        else:
            where: Any = {"device": trainer.strategy.root_device, "wrapper": trainer.strategy.model}
            held = partial(module_tensors, pl_module, trainer.optimizers, **where)
            self._meter = StepMeter(pl_module, held, device=where["device"])
        self._started, self._steps = True, trainer.global_step
        self._forward_is_next = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Manual optimization runs backward inside training_step, too early to remove the hooks on saved tensors.
        watches = self.activations and pl_module.automatic_optimization
        if self._meter is not None and self._forward_is_next and watches:
            self._meter.watch_forward()
        self._forward_is_next = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Print the fullest rank's table after the first optimizer step. All ranks exchange their accounts."""
        if self._meter is None or trainer.global_step == self._steps:
            return
        self.measured = self._meter.count_resident()
        self.on_train_end(trainer, pl_module)
        device = trainer.strategy.root_device
        found = Ranks.of().gather((self.measured, peak_bytes(device)))
        self.ranks = [account for account, _ in found]
        rank = tables.fullest_rank(self.ranks)
        allocated, reserved = map(size_text, found[rank][1])
        on_cpu = f"{allocated} resident in the process"
        taken = on_cpu if device.type == "cpu" else f"{allocated} allocated, {reserved} reserved by torch"
        notes = [f"peak so far: {taken}"]
        title = f"Memory of rank {rank}, which has the most of {len(found)}, measured in the first step"
        print_above_bar(
            trainer, tables.memory_table(self.ranks[rank], title=title, notes=notes, predicted=self.predicted)
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.stop_watching()
            self._meter = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Append the table and advice to an out-of-memory error, without communication: other ranks may hang."""
        try:
            if tables.is_out_of_memory(exception) and self._started:
                memory = _memory(trainer)
                now = self._meter.count_saved() if self._meter else memory.account() if memory else MemoryAccount()
                found = most(self.measured or self.predicted or MemoryAccount(), now)
                title = f"Memory of rank {trainer.global_rank}, as far as it was counted"
                advice = f"\n{memory.advice(found)}" if memory else ""
                tables.append_to_message(exception, tables.memory_table(found, title=title) + advice)
        except Exception as error:
            tables.append_to_message(exception, f"(MemoryCallback has no account: {type(error).__name__}: {error})")
        finally:
            self.on_train_end(trainer, pl_module)


def _memory(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "memory", None)
