"""Steps of a fit that leave nothing behind, as Lightning's learning rate finder makes them, in the same order."""

import os
import sys
import uuid
from collections.abc import Callable, Generator, Sized
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader


@contextmanager
def trials(trainer: Trainer) -> Generator[Callable[[Callback, int], None], None, None]:
    """Give a function that runs so many optimizer steps of the fit, which is about to begin, with one callback alone.

    At the end model, optimizers, loops and random numbers are again as they were, from a checkpoint. All ranks call it.
    """
    path = os.path.join(trainer.default_root_dir, f".trial_{uuid.uuid4()}.ckpt")
    path = trainer.strategy.broadcast(path)
    trainer.save_checkpoint(path)
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    state, callbacks, loggers = deepcopy(loop.state_dict()), trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
    schedulers, steps, validation = (
        trainer.strategy.lr_scheduler_configs,
        epoch_loop.max_steps,
        trainer.limit_val_batches,
    )

    def begin_anew() -> None:
        loop.load_state_dict(deepcopy(state))
        loop.restarting = epoch_loop.restarting = trainer.should_stop = False
        forget_loaders(trainer)

    def run(callback: Callback, count: int) -> None:
        begin_anew()
        trainer.callbacks, trainer.strategy.lr_scheduler_configs = [callback], []  # type: ignore[attr-defined]
        trainer.logger = None if trainer.logger is None else DummyLogger()
        epoch_loop.max_steps, trainer.limit_val_batches = count + trainer.global_step, 0
        loop.run()
        # The next one begins where this one did.
        trainer._checkpoint_connector.restore(path)

    try:
        yield run
    finally:
        trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
        trainer.strategy.lr_scheduler_configs = schedulers
        epoch_loop.max_steps, trainer.limit_val_batches = steps, validation
        trainer.strategy.remove_checkpoint(path)
    begin_anew()
    loop.setup_data()


def makes_loaders(trainer: Trainer) -> bool:
    """Whether the fit's loaders come from the LightningModule or a datamodule, and can be made anew."""
    return trainer.fit_loop._data_source.is_module()


def first_batch(trainer: Trainer) -> tuple[Any, int]:
    """The first batch of the fit's loaders, made for this alone, on the CPU; and this rank's samples, if they count."""
    loaders = trainer.fit_loop._data_source.dataloader()
    batch, *_ = next(iter(CombinedLoader(loaders, "max_size_cycle")))
    dataset = getattr(loaders, "dataset", None)
    samples = len(dataset) // trainer.world_size if isinstance(dataset, Sized) else sys.maxsize
    return trainer.lightning_module._apply_batch_transfer_handler(batch, device=torch.device("cpu")), samples


def forget_loaders(trainer: Trainer) -> None:
    """Have the fit's loaders made anew when its loop begins."""
    trainer.fit_loop._combined_loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
