"""Losses and gradients of inf or NaN: seen by all ranks together, and answered as the user asked."""

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
    """What a fit does at a loss or a gradient of inf or NaN."""

    action: Action
    """"raise": end the run, one step later, before anything is saved, so that no step waits for the device; "skip":
    leave the step out on every rank; "rollback": leave it out and go back to the newest checkpoint of this fit (or that
    it resumed from): weights, optimizers, schedulers, loss scale, generators and ``global_step``; the data goes on."""

    limit: int = 3
    """Steps skipped in a row, or rollbacks in all, after which it raises."""

    find_module: bool = False
    """Name the first module whose output is not finite, or else the first parameter whose gradient is not. It costs a
    pass over all outputs, and "raise" then waits for the device in every step."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigurationError(f"nonfinite.limit is {self.limit}, but must be 0 or more.")


class NonFiniteWatch:
    """Looks at the losses and gradients of a fit. All ranks call each method at the same point of a step."""

    def __init__(self, config: NonFinite, module: nn.Module, engine: Engine, *, device: torch.device) -> None:
        """``module``: whose outputs are looked at where ``find_module`` asks for it; ``engine`` prepared it."""
        self._config, self._module, self._engine, self._device = config, module, engine, device
        self._loss = self._no()
        self._pending: tuple[int, Callable[[], Tensor]] | None = None
        self._outputs: list[tuple[str, Tensor]] = []
        self._closing = ExitStack()
        self.steps = 0  # Steps with a loss or gradient of inf or NaN so far.
        self._in_a_row = 0
        self.rollback_due: str | None = None  # Why the fit has to go back to a checkpoint; None: it goes on.
        if config.find_module:
            for name, part in module.named_modules():
                self._closing.callback(part.register_forward_hook(partial(self._see, name)).remove)

    def _no(self) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=self._device)

    def _see(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t.detach() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if tensors:
            self._outputs.append((name, all_finite(tensors, device=self._device)))

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss ahead of its backward pass, without a loss scale in it."""
        self._loss = self._loss | ~torch.isfinite(loss.detach()).all().to(self._device)

    def judge(self, gradients: Sequence[Tensor], *, step: int) -> bool:
        """Whether to skip a step that is about to be taken, the same on every rank, or DataError. ``gradients``: this
        rank's reduced ones; none where the loss scale sees to them. ``step`` is for messages.
        """
        self.settle()
        loss, self._loss = self._loss, self._no()
        bad = torch.stack((loss, ~all_finite(gradients, device=self._device))).to(torch.float32)
        dist.all_reduce(bad)
        self._pending = step, to_host_later(bad)
        if self._config.action == "raise" and not self._config.find_module:
            return False
        return self.settle()

    def settle(self) -> bool:
        """Answer what was not looked at yet; whether the step is to be skipped, or DataError on every rank."""
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
        what = f"the loss is inf or NaN on {losses:.0f} of {dist.get_world_size()} ranks"
        what = what if losses else "gradients are inf or NaN, while the losses are finite"
        what = f"In step {step} {what}.{self._where(outputs)}"
        action, limit = self._config.action, self._config.limit
        if action == "raise":
            advice = " nonfinite: {action: raise, find_module: true} names the module." * (not self._config.find_module)
            raise DataError(f"{what} Look at the data of that step, lower the learning rate, or clip.{advice}")
        past, times = (self._in_a_row, "in a row") if action == "skip" else (self.steps, "in all")
        if past > limit:
            raise DataError(f"{what} It is the {past}th time {times}, more than nonfinite.limit = {limit}.")
        self.rollback_due = what if action == "rollback" else None
        if action == "skip":
            warn_on_first_rank(f"{what} The step is skipped.")
        return True

    def _where(self, outputs: Iterable[tuple[str, Tensor]]) -> str:
        """The first module, or parameter, of each rank, in words."""
        if not self._config.find_module:
            return ""
        found = Ranks.of().gather(next((name for name, finite in outputs if not finite), None))
        kind = "the output of"
        if not any(name is not None for name in found):
            kind, found = "the gradient of", Ranks.of().gather(self._first_gradient())
        named = [(rank, name or "the LightningModule") for rank, name in enumerate(found) if name is not None]
        return "".join(f" First on rank {rank}: {kind} {name}." for rank, name in named[:4])

    def _first_gradient(self) -> str | None:
        for name, parameter in named_parameters(self._module).items():
            gradient = self._engine.tensors.gradient(name, parameter)
            if gradient is None:
                continue
            if not all_finite(gradient.views if isinstance(gradient, FlatTensor) else [gradient], device=self._device):
                return name
        return None

    def close(self) -> None:
        self._closing.close()


def roll_back(trainer: Trainer, checkpoints: Checkpoints, why: str) -> None:
    """Put the newest whole checkpoint that a fit saved, or went on from, back in place: weights, optimizers,
    schedulers, loss scale, generators, count of steps. All ranks call it; DataError on each: there is none.
    """
    checkpoints.saver.finish_background_save()
    path, checkpoint = _open_newest(trainer, checkpoints, why)
    module, resumed = trainer.lightning_module, path not in checkpoints.saved
    if resumed:  # As then, a hook may change what is loaded, and the configuration may win.
        module.on_load_checkpoint(checkpoint)
    # What was thawed since a checkpoint of this fit begins anew.
    strict, hooked = (module.strict_loading, checkpoint) if resumed else (not callbacks.thawed(trainer), None)
    schedules = trainer.lr_scheduler_configs
    checkpoints.load_tensors(hooked, schedules, optimizers=True, strict=strict, begins=resumed)
    loops.restore_steps(trainer, checkpoint)
    callbacks.restore_states(trainer, checkpoint, EMACallback)  # how far its updates are
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
        # Not one that was saved in the batch of the step that is left out.
        usable = OPTIMIZER_STATES in checkpoint and RUN_STATE in checkpoint
        if usable and checkpoint["global_step"] < trainer.global_step:
            return path, checkpoint
    raise DataError(
        f"{why} nonfinite is rollback, but this fit has no whole checkpoint yet to go back to. Save one earlier, "
        "such as with ModelCheckpoint(every_n_train_steps=...), or use nonfinite: skip."
    )


def warn_of_nonfinite(engine: Engine) -> None:
    """After training: warn if weights of rank 0 are inf or NaN, which train on without a word."""
    parameters = [live.tensor for live in engine.tensors.memory_breakdown() if live.kind == "parameters"]
    tensors = [tensor for tensor in parameters if isinstance(tensor, Tensor)]
    # Quantised ones, integers or float8, have no norm.
    weights = [t for t in tensors if t.is_floating_point() and t.itemsize > 1]
    if not all_finite(weights, device=torch.device("cpu")):
        rank_zero_warn(
            "There is inf or NaN in the weights after training. Set nonfinite: raise, skip or rollback on the strategy "
            "to answer the first loss or gradient that is not finite."
        )
