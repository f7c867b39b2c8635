"""An average of the weights of a fit, over each rank's shards of the masters."""

from typing import Any, Literal, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard._lightning.callbacks import callbacks_of
from lightning_shard.arguments import checked
from lightning_shard.errors import ConfigurationError


class Average(Protocol):
    """The shards of an average, which a strategy of this package keeps during a fit. All ranks call each method."""

    def update(self) -> None:
        """Take the present weights into the average."""

    def swap_into_module(self, average: bool) -> None:
        """Let the module have the average, or its own weights again. Nothing happens before the first update."""

    def copy_into_module(self) -> None:
        """Give the module the average for good. Nothing happens before the first update."""


class EMACallback(Callback):
    """Averages the weights after optimizer steps, evaluates the average and leaves it in the module after a fit.

    The average is taken of the master weights, elementwise and in shards, so that nothing is gathered and the numbers
    are the same on every engine. Checkpoints have it beside the weights, and a fit goes on with it on any engine.
    ``lightning-shard checkpoint export --ema`` writes it in the place of the weights. It takes the place of Lightning's
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
        """Say how the average is taken, and where it is used.

        Args:
            decay: share of the average that each update keeps, from 0 to 1; ``equal``: the mean of all updates, as
                ``StochasticWeightAveraging`` takes it. The first update copies the weights.
            update_every_n_steps: optimizer steps from one update to the next.
            update_starting_at_step: index of the first optimizer step that is followed by an update, from 0.
            update_starting_at_epoch: index of the first epoch with updates, from 0.
            evaluate: ``average``: validation, and ``validate``, ``test`` and ``predict`` from a checkpoint, run with
                the average once it has an update, and the module has it after the fit; ``weights``: the average is in
                checkpoints alone.
            use_buffers: average buffers too; without it they stay the module's own.
            device: ``cpu`` keeps the average in host memory; null keeps it where the masters are.
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
        """That of Lightning's callback, whose checkpoints are read and written."""
        return "EMAWeightAveraging"

    def should_update(self, step: int, epoch: int) -> bool:
        """Whether the optimizer step of index ``step`` is followed by an update. A subclass may say otherwise."""
        starts = step >= self.update_starting_at_step and epoch >= self.update_starting_at_epoch
        return starts and step % self.update_every_n_steps == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average = None  # of an earlier run

    def begin(self, average: Average) -> None:
        """Average into these shards. The strategy calls it at the beginning of a fit."""
        self._average = average

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is None:
            raise ConfigurationError(
                f"EMACallback averages the shards of this package's strategies, but the Trainer has "
                f"{type(trainer.strategy).__name__}: use shard_ddp, or Lightning's EMAWeightAveraging."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = min(self._last_step, trainer.global_step)  # an earlier fit may have had more

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
    """Where an `EMACallback` among a Trainer's callbacks keeps the average: "beside" the masters or on the "host"."""
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    devices = [callback.device for callback in given if isinstance(callback, EMACallback)]
    return ("host" if devices[0] == "cpu" else "beside") if devices else None


def evaluates_average(trainer: Trainer) -> bool:
    """Whether a run that is no fit evaluates the average of its checkpoint."""
    evaluated = [callback for callback in callbacks_of(trainer, EMACallback) if callback.evaluate == "average"]
    return trainer.state.fn != TrainerFn.FITTING and bool(evaluated)
