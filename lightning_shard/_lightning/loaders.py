"""Training dataloaders of a Trainer and their saved states, and trial steps of a fit that leave no trace, run as
Lightning's learning rate finder runs them.
"""

import os
import sys
import uuid
from collections.abc import Callable, Generator, Mapping, Sized
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_shard._lightning import Replacements
from lightning_shard._lightning.loops import correct_loaded_counters, data_fetcher, loader_states_to_load
from lightning_shard.resume.loader import ResumableLoader
from lightning_shard.resume.rng import generators_in
from lightning_shard.resume.shape import KINDS, has_state, stock_type
from lightning_shard.resume.wrap import resumable


def train_batch_size(trainer: Trainer) -> int | None:
    """Batch size of a training dataloader that was given to the Trainer. None if a hook makes it."""
    size = getattr(trainer.fit_loop._data_source.instance, "batch_size", None)
    return size if isinstance(size, int) else None


def keep_order(replacements: Replacements, trainer: Trainer) -> None:
    """Divide a training loader's samples over ranks in the loader's own order, and say so once. Lightning shuffles
    them, and forgets the batch size of a stock ``BatchSampler``.
    """

    @cache
    def say_once() -> None:
        rank_zero_info(
            "The order of the training dataloader is kept. Stock Lightning shuffles it under distributed strategies: "
            "set DataLoader(shuffle=True) for that."
        )

    def resolve_sampler(resolve: Any, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage) -> Any:
        if mode == RunningStage.TRAINING:
            sampler: Any = _distributed_sampler(dataloader, trainer.distributed_sampler_kwargs or {})
            if not sampler.shuffle and not getattr(trainer, "overfit_batches", 0):
                say_once()
        else:
            sampler = resolve(dataloader, shuffle, mode)
        if stock_type(dataloader.batch_sampler) is BatchSampler and mode != RunningStage.PREDICTING:
            vars(sampler)[_BATCHES] = dataloader.batch_sampler
        return sampler

    replacements.wrap(trainer._data_connector, "_resolve_sampler", resolve_sampler)


_BATCHES = "shard_batches"


def keep_batch_size(loader: Any) -> None:
    """Give ``loader``, which Lightning made after `keep_order`, the batch size of a stock ``BatchSampler``."""
    dealing = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    given: Any = getattr(dealing, _BATCHES, None)
    if dealing is not None and given is not None:
        # A DataLoader refuses a plain assignment.
        vars(loader)["batch_sampler"] = BatchSampler(dealing, given.batch_size, given.drop_last)
        delattr(dealing, _BATCHES)


def _distributed_sampler(loader: DataLoader[Any], ranks: dict[str, Any]) -> DistributedSampler[Any]:
    """Sampler that divides ``loader``'s samples over ranks, shuffled in each epoch if a RandomSampler only permutes."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        return sampler
    ranks = {"seed": _seed(), **ranks}
    permutes = stock_type(sampler) is RandomSampler and not sampler.replacement
    if (permutes or type(sampler) is SequentialSampler) and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return DistributedSampler(loader.dataset, shuffle=permutes, **ranks)
    return DealtSampler(sampler, shuffle=False, **ranks)


class DealtSampler(DistributedSamplerWrapper):
    """Divides the indices of the sampler ``dealt`` over the ranks in their order."""

    def __init__(self, sampler: Any, **ranks: Any) -> None:
        super().__init__(sampler, **ranks)
        self.dealt = sampler


def _seed() -> int:
    """The seed of ``seed_everything``, as for Lightning's samplers, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def prepare_loader(trainer: Trainer, dataloader: Any, world_size: int, rank: int, *, sample_seeds: bool = False) -> Any:
    """Make a training ``dataloader`` resumable and correct the loop's loaded counters. All ranks call it for each
    loader, in order. Unlike in Lightning, loaders of finished epochs get their state too: generators and persistent
    workers go on.
    """
    correct_loaded_counters(trainer)
    loop = trainer.fit_loop
    samplers = [getattr(owner, "sampler", None) for owner in (dataloader, getattr(dataloader, "batch_sampler", None))]
    inner = next((sampler.dealt for sampler in samplers if isinstance(sampler, DealtSampler)), None)
    draws = (lambda: (_seed(), trainer.current_epoch)) if sample_seeds else None
    loader = resumable(dataloader, world_size=world_size, rank=rank, inner_sampler=inner, draws=draws)
    states = loader_states_to_load(trainer)
    if loop.is_resuming and not loop.restarting and states and has_state(loader):
        state = states.pop(0)
        if loader is not dataloader and state.get("kind") in KINDS:
            loader.load_state_dict(state | {"finished": True})
    return loader


def loader_states(trainer: Trainer, loops: Mapping[str, Any]) -> list[dict[str, Any]]:
    """States of the training loaders, taken out of the loops' part of a checkpoint. Of several loaders, those that are
    used up in this epoch stay so.
    """
    states, loop = loops["fit_loop"]["state_dict"].pop("combined_loader", []), trainer.fit_loop
    if (combined := loop._combined_loader) is None or combined._mode != "max_size":
        return list(states)
    goes_on = not loop.epoch_loop.batch_progress.is_last_batch
    return [{**state, "spent": goes_on and state.get("finished", False)} for state in states]


def unsaved_generators(trainer: Trainer) -> list[str]:
    """Random generators in attributes of the module, the datamodule and callbacks without an own hook for saving."""
    module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
    owners: list[Any] = [] if is_overridden("on_save_checkpoint", module) else [module]
    owners += [] if datamodule is None or is_overridden("state_dict", datamodule) else [datamodule]
    owners += [c for c in trainer.callbacks if not is_overridden("state_dict", c)]  # type: ignore[attr-defined]
    return [name for owner in owners for name in generators_in(owner)]


def recount_batches(trainer: Trainer, reloaded: int | None = None) -> None:
    """Count the batches of an interrupted epoch in units of the present loaders, whose state was loaded, since world
    size or batch size may differ. Tell iterable loaders how many batches the loop fetches ahead. All ranks call it.
    ``reloaded``: the epoch in which the interrupted run made its loaders.
    """
    loop = trainer.fit_loop
    if reloaded is not None:
        loop._last_train_dl_reload_epoch = reloaded
    fetcher = data_fetcher(trainer)
    all_loaders = CombinedLoader(trainer.train_dataloader).flattened
    for loader in all_loaders:
        if hasattr(loader, "lookahead"):
            loader.lookahead = getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0
    if not loop.is_resuming or not loop.restarting:
        return
    sized = [loader for loader in all_loaders if isinstance(loader, ResumableLoader) and loader.batches_done]
    if not sized:
        return
    # The longest one sets the length of an epoch.
    done = max(sized, key=len).batches_done
    current: Any = loop.epoch_loop.batch_progress.current
    if current.ready == done:
        return
    done = int(min(done, loop.max_batches))
    current.ready = current.started = current.processed = done
    # The loop's own reset counts the batch as completed that the checkpoint was written in.
    current.completed = done - 1 if loop.epoch_loop.restarted_on_train_batch_end else done


@contextmanager
def trial_steps(trainer: Trainer) -> Generator[Callable[[Callback, int], None], None, None]:
    """Give a function that runs a number of optimizer steps of a fit that is about to begin, with one callback alone.
    All ranks call it. A checkpoint restores everything at the end.
    """
    path = os.path.join(trainer.default_root_dir, f".trial_{uuid.uuid4()}.ckpt")
    path = trainer.strategy.broadcast(path)
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    state, callbacks, loggers = deepcopy(loop.state_dict()), trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
    schedulers, steps = trainer.strategy.lr_scheduler_configs, epoch_loop.max_steps
    validation = trainer.limit_val_batches

    def reset_loops() -> None:
        loop.load_state_dict(deepcopy(state))
        loop.restarting = epoch_loop.restarting = trainer.should_stop = False
        forget_loaders(trainer)

    def run(callback: Callback, count: int) -> None:
        reset_loops()
        trainer.callbacks, trainer.strategy.lr_scheduler_configs = [callback], []  # type: ignore[attr-defined]
        trainer.logger = None if trainer.logger is None else DummyLogger()
        epoch_loop.max_steps, trainer.limit_val_batches = count + trainer.global_step, 0
        loop.run()
        # The next trial begins at the same state.
        trainer._checkpoint_connector.restore(path)

    try:
        trainer.callbacks = []  # type: ignore[attr-defined]
        trainer.save_checkpoint(path)
        yield run
    finally:
        trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
        trainer.strategy.lr_scheduler_configs = schedulers
        epoch_loop.max_steps, trainer.limit_val_batches = steps, validation
        trainer.strategy.remove_checkpoint(path)
    reset_loops()
    loop.setup_data()


def makes_loaders(trainer: Trainer) -> bool:
    """Whether the LightningModule or a datamodule makes the fit's loaders, and can make them again."""
    return bool(trainer.fit_loop._data_source.is_module())


def first_batch(trainer: Trainer) -> tuple[Any, int]:
    """The first batch, on the CPU, of loaders made for this call, and this rank's number of samples, if known."""
    loaders = trainer.fit_loop._data_source.dataloader()
    batch = batch_of(loaders)
    dataset = getattr(loaders, "dataset", None)
    samples = len(dataset) // trainer.world_size if isinstance(dataset, Sized) else sys.maxsize
    return trainer.strategy.batch_to_device(batch, torch.device("cpu")), samples


def batch_of(loaders: Any) -> Any:
    """The first batch of ``train_dataloader``'s loaders, in the form for a training step."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    batch, *_ = next(iter(combined))
    return batch


def forget_loaders(trainer: Trainer) -> None:
    """Have the fit's loaders, which ``estimated_stepping_batches`` makes early, made again when its loop begins."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._combined_loader = None
