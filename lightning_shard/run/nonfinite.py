"""Losses and gradients of inf or NaN: found on all ranks together, then an error, a skipped step or a rollback."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard._lightning import callbacks, loops
from lightning_shard.arguments import checked_fields
from lightning_shard.callbacks.ema import EMACallback
from lightning_shard.checkpoint.files.layout import OPTIMIZER_STATES, RUN_STATE
from lightning_shard.checkpoint.files.location import location
from lightning_shard.engines.engine import Engine
from lightning_shard.errors import CheckpointError, ConfigurationError, DataError
from lightning_shard.ranks import Ranks, warn_on_first_rank
from lightning_shard.resume.rng import set_rng_state
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.tensors.clipping import all_finite
from lightning_shard.tensors.flat import FlatTensor
from lightning_shard.tensors.full import to_host_later
from lightning_shard.tensors.names import named_parameters
from lightning_shard.tensors.tracing import tree_leaves

Action = Literal["raise", "skip", "rollback"]


@checked_fields("nonfinite")
@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Action of a fit on a loss or a gradient of inf or NaN."""

    action: Action
    """"raise": end the run one step later, before anything is saved, so that no step waits for the device. "skip": skip
    the step on every rank. "rollback": skip it and go back to the newest checkpoint of this fit (or the one it resumed
    from): weights, optimizers, schedulers, loss scale, generators and ``global_step``. The data goes on."""

    limit: int = 3
    """Steps skipped in a row, or rollbacks in all, after which it raises."""

    find_module: bool = False
    """Name the first module whose output is not finite, or else the first parameter whose gradient is not. It costs a
    pass over all outputs, and "raise" then waits for the device in every step."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigurationError(f"nonfinite.limit is {self.limit}, but must be 0 or more.")


class NonFiniteWatch:
    """Checks the losses and gradients of a fit. All ranks call each method at the same point of a step."""

    def __init__(self, config: NonFinite, module: nn.Module, engine: Engine, *, device: torch.device) -> None:
        """``engine`` has prepared ``module``, whose outputs are checked under ``find_module``."""
        self._config, self._module, self._engine, self._device = config, module, engine, device
        self._loss = self._false()
        self._pending: tuple[int, Callable[[], Tensor]] | None = None
        self._outputs: list[tuple[str, Tensor]] = []
        self._hooks = ExitStack()
        self.steps = 0  # Steps with a loss or gradient of inf or NaN so far.
        self._in_a_row = 0
        self.rollback_due: str | None = None  # Reason to go back to a checkpoint. None: the fit goes on.
        if config.find_module:
            for name, part in module.named_modules():
                self._hooks.callback(part.register_forward_hook(partial(self._check_output, name)).remove)

    def _false(self) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=self._device)

    def _check_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t.detach() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if tensors:
            self._outputs.append((name, all_finite(tensors, device=self._device)))

    def check_loss(self, loss: Tensor) -> None:
        """Check a loss without loss scale, before its backward pass."""
        self._loss = self._loss | ~torch.isfinite(loss.detach()).all().to(self._device)

    def check_step(self, gradients: Sequence[Tensor], *, step: int) -> bool:
        """Whether to skip the step that is about to be taken, the same on every rank. DataError: the action is "raise",
        or the limit is passed.

        ``gradients``: reduced ones of this rank, empty if the loss scale checks them. ``step``: for messages.
        """
        self.answer_pending()
        loss, self._loss = self._loss, self._false()
        bad = torch.stack((loss, ~all_finite(gradients, device=self._device))).to(torch.float32)
        dist.all_reduce(bad)
        self._pending = step, to_host_later(bad)
        waits = self._config.action != "raise" or self._config.find_module
        return waits and self.answer_pending()

    def answer_pending(self) -> bool:
        """Answer the last check. True: skip the step. DataError on every rank: see `check_step`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        (step, read), outputs, self._outputs = pending, self._outputs, []
        losses, gradients = read().tolist()
        if not losses and not gradients:
            self._in_a_row = 0
            return False
        self.steps += 1
        self._in_a_row += 1
        found = f"the loss is inf or NaN on {losses:.0f} of {dist.get_world_size()} ranks"
        found = found if losses else "gradients are inf or NaN, while the losses are finite"
        found = f"In step {step} {found}.{self._where(outputs)}"
        action, limit = self._config.action, self._config.limit
        if action == "raise":
            advice = " nonfinite: {action: raise, find_module: true} names the module." * (not self._config.find_module)
            raise DataError(f"{found} Look at the data of that step, lower the learning rate, or clip.{advice}")
        past, times = (self._in_a_row, "in a row") if action == "skip" else (self.steps, "in all")
        if past > limit:
            raise DataError(f"{found} It is the {past}th time {times}, more than nonfinite.limit = {limit}.")
        if action == "skip":
            warn_on_first_rank(f"{found} The step is skipped.")
        else:
            self.rollback_due = found
        return True

    def _where(self, outputs: Iterable[tuple[str, Tensor]]) -> str:
        """First module, or else parameter, of each rank, as a sentence."""
        if not self._config.find_module:
            return ""
        kind, found = "output of", Ranks.of().gather(next((name for name, finite in outputs if not finite), None))
        if not any(name is not None for name in found):
            kind, found = "gradient of", Ranks.of().gather(self._first_gradient())
        named = [(rank, name or "the LightningModule") for rank, name in enumerate(found) if name is not None]
        return "".join(f" First on rank {rank}: the {kind} {name}." for rank, name in named[:4])

    def _first_gradient(self) -> str | None:
        for name, parameter in named_parameters(self._module).items():
            gradient = self._engine.gradient(name, parameter)
            parts = gradient.views if isinstance(gradient, FlatTensor) else [gradient]
            if not all_finite([part for part in parts if part is not None], device=self._device):
                return name
        return None

    def remove_hooks(self) -> None:
        self._hooks.close()


def roll_back_if_due(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """If the last step asks for it, load the newest whole checkpoint that the fit saved or resumed from: weights,
    optimizers, schedulers, loss scale, generators, step count. All ranks call it. DataError on each: there is none.
    """
    watch: NonFiniteWatch | None = vars(trainer.precision_plugin).get("nonfinite")
    if watch is None or (why := watch.rollback_due) is None:
        return
    watch.rollback_due = None
    checkpoints.saver.finish_background_save()
    path, checkpoint = _open_newest(trainer, checkpoints, why)
    module, resumed = trainer.lightning_module, path not in checkpoints.saved
    if resumed:  # As on resume, a hook may change the checkpoint, and the configuration may win.
        module.on_load_checkpoint(checkpoint)
    # A checkpoint of this fit lacks the state of parameters that were thawed later.
    strict, hooked = (module.strict_loading, checkpoint) if resumed else (not callbacks.trainable_state(trainer), None)
    schedules = trainer.lr_scheduler_configs
    checkpoints.load_tensors(hooked, schedules, optimizers=True, strict=strict, begins=resumed)
    loops.restore_steps(trainer, checkpoint)
    callbacks.restore_callback_states(trainer, checkpoint, EMACallback)  # its count of updates
    states = checkpoint[RUN_STATE]["ranks"]
    if trainer.global_rank < len(states):
        set_rng_state(states[trainer.global_rank]["rng"])
    rank_zero_warn(f"{why} The fit went back to step {trainer.global_step}, {path}; the data goes on.")


def _open_newest(trainer: Trainer, checkpoints: Checkpoints, why: str) -> tuple[str, dict[str, Any]]:
    own = [*checkpoints.saved, *([trainer.ckpt_path] if trainer.ckpt_path else [])]
    for path in Ranks.of().broadcast([os.fspath(p) for p in own if location(p).is_dir()]):
        try:
            checkpoint = checkpoints.load_checkpoint(path)
        except CheckpointError as error:
            rank_zero_warn(f"The fit can't go back to {path}: {error}")
            continue
        # A checkpoint of the skipped step's own batch does not count.
        usable = OPTIMIZER_STATES in checkpoint and RUN_STATE in checkpoint
        if usable and checkpoint["global_step"] < trainer.global_step:
            return path, checkpoint
    raise DataError(
        f"{why} nonfinite is rollback, but this fit has no whole checkpoint yet to go back to. Save one earlier, "
        "such as with ModelCheckpoint(every_n_train_steps=...), or use nonfinite: skip."
    )


def warn_of_nonfinite(engine: Engine) -> None:
    """Warn after training if weights of rank 0 are inf or NaN."""
    live = [each.tensor for each in engine.memory_breakdown() if each.kind == "parameters"]
    # Quantised weights, integers or float8, have no norm.
    weights = [t for t in live if isinstance(t, Tensor) and t.is_floating_point() and t.itemsize > 1]
    if not all_finite(weights, device=torch.device("cpu")):
        rank_zero_warn(
            "There is inf or NaN in the weights after training. Set nonfinite: raise, skip or rollback on the strategy "
            "to answer the first loss or gradient that is not finite."
        )
