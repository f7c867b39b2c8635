"""Values that a module logs with ``self.log(..., on_epoch=True)`` in training, carried over a resume in mid-epoch.

Lightning keeps them in a ``_ResultCollection``, which no checkpoint has, so that an epoch's value would be that of the
batches after the resume. An entry is created by the first ``log`` call of its key; the collection put in place here
gives it the earlier batches' sum before the value is added, so that the order of additions is the uninterrupted run's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard._lightning import Replacements, processes
from lightning_shard._lightning.loops import leave_restart
from lightning_shard.resume.metrics import set_update_count
from lightning_shard.tensors.full import full_of
from lightning_shard.text import listed

# Hooks that run again in a resumed run, or at the epoch's real end: their values must not be counted twice.
_RUN_AGAIN = frozenset({"on_train_start", "on_train_epoch_end", "on_train_end"})
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def log_full_values(replacements: Replacements, module: LightningModule) -> None:
    """Let ``self.log`` take the full values of sharded tensors, such as ``weight.norm()``, as a collective."""

    def log_full(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, full_of(value) if isinstance(value, DTensor) else value, *args, **kwargs)

    replacements.wrap(module, "log", log_full)


def log_graphs(replacements: Replacements, trainer: Trainer) -> None:
    """Let loggers trace the module's graph now, on rank 0, while its parameters are neither sharded nor cast."""
    module = trainer.lightning_module
    sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters())
    if (first := next(module.parameters(), None)) is not None:
        processes.set_device(module, first.device)  # where loggers put the example input
    for logger in trainer.loggers if trainer.enable_autolog_hparams else []:
        try:
            if not sharded:
                logger.log_graph(module)
            elif getattr(logger, "_log_graph", False):
                rank_zero_warn("The model's graph is not logged: an earlier run has sharded the model.")
        except Exception as error:
            rank_zero_warn(f"The model's graph is not logged: its forward can't be traced ({error}).")
        replacements.replace(logger, "log_graph", lambda model: None)


def training_results_state(trainer: Trainer, *, validates: bool) -> dict[str, Any]:
    """What was logged in this epoch of a fit so far, on this rank: copies on the CPU that ``weights_only=True`` loads.
    All ranks call it, which communicate at an epoch's end alone. ``validates``: a resumed run begins with a validation.

    ``epoch``: its index in this fit; ``ended``: whether its end was reached; ``due``: the interval whose plateau
    schedulers Lightning steps next; ``late``: names that are logged after this, and before that; ``entries``: the
    values on their way to an epoch's mean, sum, minimum or maximum, and names of metrics that are logged as objects
    (their states are the metrics' own); ``evaluation_metrics``: metrics that Lightning is about to reset, as an
    evaluation has just ended; ``callback_metrics``.
    """
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress.current
    results = fit_loop.epoch_loop._results
    entries = dict(results.pending) if isinstance(results, _ResumedResults) else {}  # not logged again since a resume
    entries |= {key: _entry_state(e) for key, e in _live(results) if e.meta.on_epoch or not e.is_tensor}
    validated = _live(fit_loop.epoch_loop.val_loop._results)
    evaluation = [e.meta.metric_attribute for _, e in validated if not e.is_tensor]
    batches: Any = fit_loop.epoch_loop.batch_progress.current
    due = None
    if epochs.processed > epochs.completed:
        due = "epoch"
    elif batches.processed > batches.completed and not validates:  # Lightning steps them after a validation
        due = "step"
    # Between batches of an epoch, reading them computes nothing and so synchronises nothing; at its end its values are
    # those that schedulers are about to step by, but for what the hook that saves goes ahead of.
    current = trainer._logger_connector._first_loop_iter is not None or due == "epoch"
    seen = trainer.callback_metrics if current else _seen(trainer)
    hook = [e.meta for e in results.values() if e.has_reset and e.meta.fx == "on_train_epoch_end"]
    return {
        "epoch": epochs.ready - 1,
        "ended": epochs.processed >= epochs.ready,
        "due": due,
        "late": [meta.name for meta in hook] if due == "epoch" else [],
        "entries": entries,
        "evaluation_metrics": [name for name in evaluation if name is not None],
        "callback_metrics": {
            name: value.detach().to("cpu", copy=True) for name, value in seen.items() if isinstance(value, Tensor)
        },
    }


def restore_training_results(
    replacements: Replacements, trainer: Trainer, by_rank: list[dict[str, Any]], *, rank: int, world_size: int
) -> None:
    """Continue the epoch from what :func:`training_results_state` gave on each old rank, ``by_rank`` (no
    communication).

    All ranks call it in the strategy's ``on_train_start``, after the sanity check, which clears it, and after the
    metrics' own states were restored. If the checkpoint's epoch has ended, its values are dropped, and the metrics
    reset that Lightning would have reset. At another ``world_size`` the sums of old rank ``r`` go to rank ``r %
    world_size``; what is not synced begins on a new rank as on rank ``rank % len(by_rank)``.
    """
    fit_loop = trainer.fit_loop
    seen_here = by_rank[rank % len(by_rank)]["callback_metrics"]
    device = trainer.strategy.root_device
    # Schedulers and callbacks that monitor a value which is logged rarely find it, as they would have.
    for name, value in seen_here.items():
        _seen(trainer).setdefault(name, value.to(device))
    entries = _merged_entries(by_rank, rank=rank, world_size=world_size)
    _reset_metrics(trainer.lightning_module, [name for state in by_rank[:1] for name in state["evaluation_metrics"]])
    saved = by_rank[0]
    _step_plateau_schedulers(trainer, saved["due"], saved.get("late", []))
    epochs: Any = fit_loop.epoch_progress.current
    if saved["epoch"] < 0 or epochs.processed != saved["epoch"]:
        _reset_metrics(trainer.lightning_module, [e["attribute"] for e in entries.values() if e["attribute"]])
        unreported = [e["meta"]["name"] for e in entries.values()]
        if unreported and not saved["ended"]:
            rank_zero_warn(
                f"The checkpoint was written after the last batch of epoch {saved['epoch']} and before its end, which "
                f"does not run in the resumed fit: its values of {listed(unreported)} are not reported."
            )
        return
    entries = {key: entry for key, entry in entries.items() if entry["meta"]["fx"] not in _RUN_AGAIN}
    epoch_loop = fit_loop.epoch_loop
    replacements.replace(epoch_loop, "_results", _ResumedResults(trainer, entries, so_far=epoch_loop._results))
    if epoch_loop.batch_progress.current.ready > 0:
        # The next batch is not the first of its epoch, at which values of the epoch before are cleared.
        trainer._logger_connector._first_loop_iter = False
    # Lightning would leave the schedulers that monitor a value alone at this epoch's end, for want of the value.
    leave_restart(trainer)


def _step_plateau_schedulers(trainer: Trainer, due: str | None, late: list[str]) -> None:
    """Do what Lightning had left to do when it wrote the checkpoint, and does not do when it resumes; ``late``: names
    that had no value yet.
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
        # `trainer.current_epoch`, by which schedulers of another frequency are chosen, was still the last epoch's.
        epochs.completed = epochs.processed - 1
    trainer.fit_loop.epoch_loop.update_lr_schedulers(due or "", update_plateau_schedulers=True)
    epochs.completed = completed


class _ResumedResults(_ResultCollection):
    """A training loop's results that get the earlier batches' as they appear."""

    def __init__(self, trainer: Trainer, entries: dict[str, dict[str, Any]], *, so_far: _ResultCollection) -> None:
        super().__init__(training=True)
        self._trainer = trainer
        self.pending = entries
        self._created: list[str] = []
        for key, entry in so_far.items():
            # Of an earlier fit, or of hooks of this one that have just run: not those of the interrupted epoch.
            super().__setitem__(key, entry)
            if not entry.has_reset:
                self.pending.pop(key, None)

    def __bool__(self) -> bool:
        # Lightning reads no values of an empty one, where the epoch's end comes next and nothing is logged again.
        return bool(len(self) or self.pending)

    @torch.compiler.disable
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        key = f"{fx}.{name}"
        if key in self.pending and key in self:
            # An empty entry of an earlier fit with this trainer.
            del self[key]
        super().log(fx, name, value, *args, **kwargs)

    def __setitem__(self, key: str, entry: Any) -> None:
        saved = self.pending.pop(key, None)
        if saved is not None:
            _give(entry, saved)
        super().__setitem__(key, entry)

    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            self._create_rest()
        return super().metrics(on_step)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        if metrics is None and fx is None:
            self.pending.clear()
            for key in self._created:
                # The next epoch's may be logged in another way.
                self.pop(key).reset()
            self._created.clear()
        super().reset(metrics, fx)

    def _create_rest(self) -> None:
        """At the epoch's end: create the entries that no batch after the resume has logged."""
        lost = []
        # `__setitem__` takes them out.
        for key, saved in list(self.pending.items()):
            self.pop(key, None)
            value = _logged(self._trainer, saved)
            if value is None:
                lost.append(saved["meta"]["name"])
                del self.pending[key]
                continue
            how = {"metric_attribute": saved["attribute"], "rank_zero_only": saved["rank_zero_only"]}
            reduce = self._trainer.strategy.reduce
            super().log(value=value, batch_size=1, sync_dist_fn=reduce, **saved["meta"], **how)
            # What `log` has added is taken out again, and nothing was communicated for it.
            _give(self[key], saved)
            self[key].meta.sync.should = saved["sync"]
            set_update_count(self[key], saved["count"])
            self._created.append(key)
        if lost:
            rank_zero_warn(
                f"{listed(lost)} is not reported for this epoch: it was logged before the checkpoint and not since, "
                "and the metric, or the sync_dist_group, that it was logged with can't be found again."
            )


def _seen(trainer: Trainer) -> Any:
    """``trainer.callback_metrics`` as they were when these were computed last."""
    return trainer._logger_connector._callback_metrics


def _live(results: _ResultCollection) -> Iterator[tuple[str, Any]]:
    return ((key, entry) for key, entry in results.items() if not entry.has_reset)


def _entry_state(entry: Any) -> dict[str, Any]:
    meta = entry.meta
    state: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in _META} | {"reduce_fx": meta.reduce_fx.__name__},
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "grouped": meta.sync.group is not None,
        "attribute": None if entry.is_tensor else meta.metric_attribute,
        "is_tensor": entry.is_tensor,
        "count": entry.update_count,
    }
    if entry.is_tensor:
        state["value"] = entry.value.detach().to("cpu", copy=True)
        if meta.is_mean_reduction:
            state["weight"] = torch.as_tensor(entry.cumulated_batch_size).detach().to("cpu", copy=True)
    return state


def _give(entry: Any, saved: Mapping[str, Any]) -> None:
    """Make ``entry``, just created, what it was; one that is now logged in another way starts anew."""
    same = entry.is_tensor and saved["is_tensor"] and entry.meta.reduce_fx.__name__ == saved["meta"]["reduce_fx"]
    if not same or not entry.meta.on_epoch:
        return
    entry.value = saved["value"].to(entry.value.device)
    if entry.meta.is_mean_reduction:
        entry.cumulated_batch_size = saved["weight"].to(entry.value.device)
    set_update_count(entry, saved["count"])


def _logged(trainer: Trainer, saved: Mapping[str, Any]) -> Tensor | Metric | None:
    """What a ``log`` call may be given to create the entry; None if that can't be known."""
    if saved["grouped"] or not saved["is_tensor"]:
        return None if saved["grouped"] else _metric(trainer.lightning_module, saved["attribute"])
    return torch.zeros((), device=trainer.strategy.root_device)


def _metric(module: LightningModule, name: str | None) -> Metric | None:
    found = dict(module.named_modules(remove_duplicate=False)).get(name) if name else None
    return found if isinstance(found, Metric) else None


def _reset_metrics(module: LightningModule, names: list[str]) -> None:
    for metric in (_metric(module, name) for name in names):
        if metric is not None:
            metric.reset()


def _merged_entries(by_rank: list[dict[str, Any]], *, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """This rank's entries: the same keys in the same order on all ranks, since syncing them is collective."""
    saved = [state["entries"] for state in by_rank]
    mine = range(rank, len(saved), world_size)
    merged: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for entries in saved for key in entries):
        anyone = next(entries[key] for entries in saved if key in entries)
        parts = [saved[old][key] for old in mine if key in saved[old]]
        if not parts and not anyone["sync"]:
            parts = [saved[rank % len(saved)].get(key, anyone)]
        entry = dict(parts[0]) if parts else _neutral(anyone)
        for part in parts[1:]:
            if "value" in entry and "value" in part:
                # Of a mean, the sum of values times batch sizes.
                merge = {"min": torch.minimum, "max": torch.maximum}.get(entry["meta"]["reduce_fx"], torch.add)
                entry["value"] = merge(entry["value"], part["value"])
            if "weight" in entry and "weight" in part:
                entry["weight"] = entry["weight"] + part["weight"]
            entry["count"] += part["count"]
        if "weight" in entry and len(saved) != world_size:
            # Lightning averages weights over ranks in their dtype, and would cut the fraction off now that they differ.
            entry["weight"] = entry["weight"].to(entry["value"].dtype)
        merged[key] = entry
    return merged


def _neutral(entry: Mapping[str, Any]) -> dict[str, Any]:
    """``entry`` as if it had seen nothing; its dtypes stay, which syncing needs to be the same on all ranks."""
    neutral = {**entry, "count": 0}
    if "value" in entry:
        start = {"min": float("inf"), "max": float("-inf")}.get(entry["meta"]["reduce_fx"], 0.0)
        neutral["value"] = torch.full_like(entry["value"], start)
    if "weight" in entry:
        neutral["weight"] = torch.zeros_like(entry["weight"])
    return neutral
