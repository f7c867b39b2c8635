"""Average the master weights of a fit over each rank's shards."""

from typing import Any, Literal, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard._lightning.callbacks import callbacks_of
from lightning_shard.arguments import checked
from lightning_shard.errors import ConfigurationError


class Average(Protocol):
    """The shards of an average, which a strategy of this package keeps during a fit. All ranks call each method."""

    def update(self) -> None:
        """Update the average with the current weights."""

    def swap_into_module(self, average: bool) -> None:
        """Put the average into the module, or restore its own weights. Before the first update, do nothing."""

    def copy_into_module(self) -> None:
        """Copy the average over the module's weights. Before the first update, do nothing."""


class EMACallback(Callback):
    """Averages the weights after optimizer steps, evaluates the average and leaves it in the module after a fit.

    The master weights are averaged elementwise in shards, so nothing is gathered and the numbers are the same on every
    engine. Checkpoints contain the average next to the weights, and a fit resumes it on any engine.
    ``lightning-shard checkpoint export --ema`` writes it in place of the weights. This callback replaces Lightning's
    ``EMAWeightAveraging``, ``WeightAveraging`` and ``StochasticWeightAveraging``, which copy the whole module.
    """

    @checked("EMACallback")
    def __init__(
        self,
        decay: float | Literal["equal"] = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        update_starting_at_epoch: int = 0,
        evaluate: Literal["average", "weights"] = "average",
        use_buffers: bool = True,
        device: Literal["cpu"] | None = None,
    ) -> None:
        """Set up the average and its uses.

        Args:
            decay: share of the average that each update keeps, from 0 to 1. ``equal``: the mean of all updates, as in
                ``StochasticWeightAveraging``. The first update copies the weights.
            update_every_n_steps: optimizer steps from one update to the next.
            update_starting_at_step: index of the first optimizer step that is followed by an update, from 0.
            update_starting_at_epoch: index of the first epoch with updates, from 0.
            evaluate: ``average``: validation uses the average once it has an update, and so do ``validate``, ``test``
                and ``predict`` from a checkpoint. The module has it after the fit. ``weights``: only checkpoints
                contain the average.
            use_buffers: average buffers too. Otherwise the module keeps its own.
            device: ``cpu`` keeps the average in host memory. null keeps it in the memory of the masters.
        """
        if not isinstance(decay, str) and not 0 <= decay <= 1:
            raise ConfigurationError(f"decay of EMACallback is {decay}, but must be from 0 to 1, or equal.")
        if update_every_n_steps < 1:
            raise ConfigurationError(
                f"update_every_n_steps of EMACallback is {update_every_n_steps}, but must be 1 or more."
            )
        self.decay, self.use_buffers, self.device, self.evaluate = decay, use_buffers, device, evaluate
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch
        self._last_step = 0  # Optimizer steps at the last update.
        self._average: Average | None = None

    @property
    def state_key(self) -> str:
        """The key of Lightning's callback, because checkpoints are exchanged with it."""
        return "EMAWeightAveraging"

    def should_update(self, step: int, epoch: int) -> bool:
        """Whether an update follows the optimizer step of index ``step``. Subclasses may override it."""
        starts = step >= self.update_starting_at_step and epoch >= self.update_starting_at_epoch
        return starts and step % self.update_every_n_steps == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average = None  # Drop the shards of an earlier run.

    def use_average(self, average: Average) -> None:
        """Set the shards to update. The strategy calls this when a fit begins."""
        self._average = average

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is None:
            raise ConfigurationError(
                f"EMACallback averages the shards of this package's strategies, but the Trainer has "
                f"{type(trainer.strategy).__name__}: use shard_ddp, or Lightning's EMAWeightAveraging."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = min(self._last_step, trainer.global_step)  # An earlier fit may have had more steps.

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        steps = trainer.global_step
        due = steps > self._last_step and self.should_update(steps - 1, trainer.current_epoch)
        if due and self._average is not None:
            self._average.update()
            self._last_step = steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is not None and self.evaluate == "average":
            self._average.copy_into_module()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is not None and self.evaluate == "average":
            self._average.swap_into_module(True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is not None and self.evaluate == "average":
            self._average.swap_into_module(False)

    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step = state_dict["latest_update_step"]


def memory_of_averages(callbacks: Any) -> str | None:
    """The memory of the average of an `EMACallback` among a Trainer's callbacks: the "masters" or "host" one."""
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    devices = [callback.device for callback in given if isinstance(callback, EMACallback)]
    return ("host" if devices[0] == "cpu" else "masters") if devices else None


def evaluates_average(trainer: Trainer) -> bool:
    """Whether ``validate``, ``test`` or ``predict`` evaluates the average in its checkpoint."""
    evaluated = [callback for callback in callbacks_of(trainer, EMACallback) if callback.evaluate == "average"]
    return trainer.state.fn != TrainerFn.FITTING and bool(evaluated)
