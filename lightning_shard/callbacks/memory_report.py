"""Where each rank's memory goes: a table at the start of a fit, one after its first step, one in the error."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard._lightning.messages import say
from lightning_shard.arguments import checked
from lightning_shard.engines.memory_breakdown import module_tensors
from lightning_shard.memory import MemoryAccount, most
from lightning_shard.meters import memory_account as tables
from lightning_shard.meters.memory_account import StepMeter
from lightning_shard.meters.throughput_windows import peak_bytes, size_text
from lightning_shard.ranks import Ranks


class MetersStep(Callback):
    """Tells a `StepMeter` that has begun when forward has ended, and when the optimizer is to step."""

    _meter: StepMeter | None = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._meter is not None:
            self._meter.forward_ended()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.ready_to_step()


class MemoryCallback(MetersStep):
    """Prints the bytes per rank of parameters, masters, gradients, optimizer state, activations and buffers.

    At the start of a fit by arithmetic, without activations; after the first optimizer step as counted on live tensors
    in it, the same on every engine, of the rank with the most, which the table names. Later steps cost nothing. When
    memory runs out in the fit, the table and what would hold less go into the error's message.

    Attributes:
        predicted: the fullest rank's account of a step, by arithmetic at the start; None under other strategies and
            for modules that were sharded before the run.
        measured: this rank's account of the first step; None before it.
        ranks: all ranks' measured accounts, on every rank.
    """

    @checked("MemoryCallback")
    def __init__(self, activations: bool = True) -> None:
        """Say what is measured.

        Args:
            activations: count what autograd keeps in the first step. Turn it off where hooks on saved tensors get in
                the way of something else.
        """
        self.activations = activations
        self.predicted: MemoryAccount | None = None
        self.measured: MemoryAccount | None = None
        self.ranks: list[MemoryAccount] = []
        self._started = False

    def before_sharding(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the module's parameters while they are full. This package's strategies call it."""
        self._predicting(trainer, lambda memory: memory.note_module())

    def _predicting(self, trainer: Trainer, ask: Callable[[Any], Any]) -> Any:
        """Ask this package's strategies; what is not in the arithmetic is no reason to end a run."""
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
        # In manual optimization backward runs inside of the step, and hooks on saved tensors can't be taken off there.
        watches = self.activations and pl_module.automatic_optimization
        if self._meter is not None and self._forward_is_next and watches:
            self._meter.start()
        self._forward_is_next = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the first optimizer step, count its state, meet the other ranks and print."""
        if self._meter is None or trainer.global_step == self._steps:
            return
        meter, self._meter = self._meter, None
        self.measured = meter.stepped()
        device = trainer.strategy.root_device
        found = Ranks.of().gather((self.measured, peak_bytes(device)))
        self.ranks = [account for account, _ in found]
        rank = tables.largest(self.ranks)
        allocated, reserved = map(size_text, found[rank][1])
        on_cpu = f"{allocated} resident in the process"
        taken = on_cpu if device.type == "cpu" else f"{allocated} allocated, {reserved} reserved by torch"
        notes = [f"peak so far: {taken}"]
        title = f"Memory of rank {rank}, which has the most of {len(found)}, measured in the first step"
        say(trainer, tables.memory_table(self.ranks[rank], title=title, notes=notes, predicted=self.predicted))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say in an error of used up memory where it went, and what would hold less."""
        meter, self._meter = self._meter, None
        try:
            if tables.is_out_of_memory(exception) and self._started:
                # No communication: other ranks may be anywhere.
                memory = _memory(trainer)
                now = meter.failed() if meter else memory.account() if memory else MemoryAccount()
                found = most(self.measured or self.predicted or MemoryAccount(), now)
                title = f"Memory of rank {trainer.global_rank}, as far as it was counted"
                advice = f"\n{memory.advice(found)}" if memory else ""
                tables.append_to_message(exception, tables.memory_table(found, title=title) + advice)
        except Exception as error:
            tables.append_to_message(exception, f"(MemoryCallback has no account: {type(error).__name__}: {error})")
        finally:
            if meter is not None:
                meter.stop()


def _memory(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "memory", None)
