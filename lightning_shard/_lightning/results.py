"""Logged values: full ones of sharded tensors, and those that callbacks and schedulers of a resumed run need. Epoch
means of ``self.log(..., on_epoch=True)`` are in no checkpoint and begin again.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard._lightning import Replacements, processes
from lightning_shard._lightning.loops import batches_are_done, leave_restart
from lightning_shard.engines.dtensor_refusals import is_full
from lightning_shard.errors import ConfigurationError
from lightning_shard.tensors.full import full_of
from lightning_shard.text import listed

# Hooks that run again in a resumed run, or at the epoch's real end: their values must not be counted twice.
_RUN_AGAIN = frozenset({"on_train_start", "on_train_epoch_end", "on_train_end"})


def log_of_full_module(replacements: Replacements, trainer: Trainer) -> None:
    """Log full values of sharded tensors from here on, and graphs now, before the module is sharded.

    ``self.log`` gathers sharded tensors, such as ``weight.norm()``, in a collective. ConfigurationError: with
    ``rank_zero_only=True``.
    """

    def log_full(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, DTensor):
            if kwargs.get("rank_zero_only") and not is_full(value):
                raise ConfigurationError(
                    f"self.log({name!r}, ..., rank_zero_only=True) has a sharded tensor, whose value all ranks gather "
                    "together. Call self.log on all ranks, without rank_zero_only, or log tensor.full_tensor(), which "
                    "all ranks call (examples/guides/contract.md)."
                )
            value = full_of(value)
        log(name, value, *args, **kwargs)

    module = trainer.lightning_module
    replacements.wrap(module, "log", log_full)
    sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters())  # by an earlier run
    if (first := next(module.parameters(), None)) is not None:
        processes.set_device(module, first.device)  # loggers move the example input to it
    for logger in trainer.loggers if trainer.enable_autolog_hparams else []:
        try:
            if not sharded:
                logger.log_graph(module)
        except Exception as error:
            rank_zero_warn(f"The model's graph is not logged: its forward can't be traced ({error}).")
        replacements.replace(logger, "log_graph", lambda model: None)


def training_results_state(trainer: Trainer, *, validates: bool) -> dict[str, Any]:
    """State of logged values in this epoch of a fit on this rank: copies on the CPU that ``weights_only=True`` loads.
    All ranks call it, and communicate only at an epoch's end. ``validates``: a resumed run begins with a validation.
    - ``epoch``: its index in this fit. ``ended``: whether its end was reached.
    - ``due``: the interval whose plateau schedulers Lightning steps next. ``late``: names logged between now and then.
    - ``entries``: names of the epoch's values.
    - ``evaluation_metrics``: metrics that Lightning is about to reset, as an evaluation has just ended.
    - ``callback_metrics``: with the epoch's values after its last batch.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress.current
    results = loop._results
    begun = {key: e for key, e in results.items() if not e.has_reset and (e.meta.on_epoch or not e.is_tensor)}
    validated = loop.val_loop._results.values()
    evaluation = [e.meta.metric_attribute for e in validated if not e.has_reset and not e.is_tensor]
    due = None
    if epochs.processed > epochs.completed:
        due = "epoch"
    elif batches.processed > batches.completed and not validates:  # Lightning steps them after a validation
        due = "step"
    # Between batches of an epoch, reading them computes and synchronises nothing. At its end they are the values that
    # schedulers are about to step by, except for names logged after the hook that saves.
    seen = trainer.callback_metrics
    if due != "epoch" and batches_are_done(trainer):
        for entry in begun.values():
            # The class's function, which caches no value: another may still be logged.
            value = type(entry).compute(entry)
            seen = {**seen, entry.meta.name: value, entry.meta.forked_name(on_step=False): value}
    late = [e.meta.name for e in results.values() if e.has_reset and e.meta.fx == "on_train_epoch_end"]
    return {
        "epoch": epochs.ready - 1,
        "ended": epochs.processed >= epochs.ready,
        "due": due,
        "late": late if due == "epoch" else [],
        "entries": {
            key: {
                "meta": {"fx": e.meta.fx, "name": e.meta.name},
                "attribute": None if e.is_tensor else e.meta.metric_attribute,
            }
            for key, e in begun.items()
        },
        "evaluation_metrics": [name for name in evaluation if name is not None],
        "callback_metrics": {
            name: value.detach().to("cpu", copy=True) for name, value in seen.items() if isinstance(value, Tensor)
        },
    }


def restore_training_results(trainer: Trainer, by_rank: list[dict[str, Any]], *, rank: int) -> None:
    """Continue the epoch from each old rank's :func:`training_results_state`, ``by_rank`` (no communication).

    All ranks call it in the strategy's ``on_train_start``: after the sanity check, which clears the values, and after
    the metrics' own states were restored. If the checkpoint's epoch has no batches left, the metrics are reset that
    Lightning would have reset. Else a warning says that means begin again.
    """
    fit_loop, module = trainer.fit_loop, trainer.lightning_module
    saved = by_rank[rank % len(by_rank)]
    # For schedulers and callbacks that monitor a rarely logged value.
    for name, value in saved["callback_metrics"].items():
        trainer.callback_metrics.setdefault(name, value.to(trainer.strategy.root_device))
    _reset_metrics(module, saved["evaluation_metrics"])
    _step_plateau_schedulers(trainer, saved["due"], saved.get("late", []))
    epochs: Any = fit_loop.epoch_progress.current
    entries = [entry for entry in saved["entries"].values() if entry["meta"]["fx"] not in _RUN_AGAIN]
    goes_on = 0 <= saved["epoch"] == epochs.processed
    if not goes_on or batches_are_done(trainer):
        _reset_metrics(module, [entry["attribute"] for entry in saved["entries"].values()])
        if entries and not saved["ended"]:
            rank_zero_warn(
                f"The checkpoint was written after the last batch of epoch {saved['epoch']} and before its end: its "
                f"values of {_names(entries)} are not logged."
            )
    elif begun := [entry for entry in entries if not entry["attribute"]]:
        rank_zero_warn(
            f"The fit goes on in the middle of epoch {saved['epoch']}: of {_names(begun)} the epoch's values, which are"
            " in no checkpoint, begin again here. Log torchmetrics as objects, which go on, or save at epochs' ends."
        )
    if goes_on:
        # Else Lightning would not step schedulers that monitor a value at this epoch's end, since it lacks the value.
        leave_restart(trainer)


def _step_plateau_schedulers(trainer: Trainer, due: str | None, late: list[str]) -> None:
    """Make the step that Lightning had due when it wrote the checkpoint, and does not make when it resumes. ``late``:
    names that had no value yet.
    """
    configs = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == due]
    if missing := [c.monitor for c in configs if c.monitor in late or c.monitor not in trainer.callback_metrics]:
        rank_zero_warn(
            f"The schedule that monitors {missing[0]} takes no step for the {due} after which the checkpoint was "
            f"saved, as {missing[0]} was logged after that. Save later, as ModelCheckpoint does, to go on exactly."
        )
    if missing or not configs:
        return
    epochs: Any = trainer.fit_loop.epoch_progress.current
    completed = epochs.completed
    if due == "epoch":
        # `trainer.current_epoch`, which selects schedulers of another frequency, was still the last epoch's.
        epochs.completed = epochs.processed - 1
    trainer.fit_loop.epoch_loop.update_lr_schedulers(due or "", update_plateau_schedulers=True)
    epochs.completed = completed


def _names(entries: list[dict[str, Any]]) -> str:
    return listed([entry["meta"]["name"] for entry in entries])


def _reset_metrics(module: LightningModule, names: list[str | None]) -> None:
    modules = dict(module.named_modules(remove_duplicate=False))
    for metric in (modules.get(name) for name in names if name):
        if isinstance(metric, Metric):
            metric.reset()
