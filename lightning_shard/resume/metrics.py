"""States of the torchmetrics in a module. Each rank has its own until the metric is computed, mostly not in
``state_dict()``. So every rank's is saved, and at another world size they are merged as torchmetrics merges ranks.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_shard.private_names import require
from lightning_shard.tensors.names import unwrapped_modules
from lightning_shard.tensors.tracing import tree_map, tree_map_only
from lightning_shard.text import first_line

require(Metric, "_cache _is_synced _reduce_states _update_count")
require(Running, "_num_vals_seen")


def metric_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """State of each metric in ``module`` on this rank, by FQN (no communication): copies on the CPU that load with
    ``weights_only=True``. A metric with other values in its state is left out, with a warning that names it.
    """
    copies: dict[int, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for name, metric in _named(module):
        try:
            states[name] = _copy(_read(metric), copies)
        except TypeError as error:
            refused.append(f"{name} ({error})")
    if refused:
        warnings.warn(
            f"The state of these metrics is not saved, because it is not made of tensors, numbers and strings: "
            f"{', '.join(refused)}. They start again when the run is resumed.",
            stacklevel=2,
        )
    return states


def load_metric_states(module: nn.Module, by_rank: list[dict[str, dict[str, Any]]], rank: int, world_size: int) -> None:
    """Restore the metrics in ``module`` from :func:`metric_states` of each old rank, ``by_rank`` (no communication).

    With the old ``world_size`` each rank gets its own back, bitwise. Else old rank ``r`` goes to rank ``r %
    world_size``, merged with others there, and further ranks start at zero. One warning on rank 0 names the metrics
    that are left reset: new, removed and changed ones, and those whose states can't be merged.
    """
    # Each MetricTracker gets as many metrics as it had.
    for name, tracker in list(_named(module)):
        if isinstance(tracker, MetricTracker):
            while tracker.n_steps < by_rank[0].get(name, {}).get("steps", 0):
                tracker.increment()
    metrics = dict(_named(module))
    saved_names = dict.fromkeys(name for states in by_rank for name in states)
    # Reset all first, since a metric made of others resets them too.
    for each in metrics.values():
        if isinstance(each, Metric):
            each.reset()
    notes = [f"{name} is new" for name in metrics if name not in saved_names]
    notes += [f"{name} is no longer in the module" for name in saved_names if name not in metrics]
    mine = range(rank, len(by_rank), world_size)
    for name in saved_names:
        metric = metrics.get(name)
        if not isinstance(metric, Metric):
            continue
        # Checked on all old ranks' states, so that every rank decides alike.
        saved = [states[name] for states in by_rank if name in states]
        changed = next((why for why in (_mismatch(metric, state) for state in saved) if why), None)
        if changed is None and len(by_rank) > world_size:
            changed = _why_not_mergeable(metric, saved)
        if changed is not None:
            notes.append(f"{name} {changed}")
            continue
        parts = [by_rank[old][name] for old in mine if name in by_rank[old]]
        if parts:
            _merge(metric, parts)
    if notes and rank == 0:
        warnings.warn(f"Metrics that start again after resuming: {'; '.join(notes)}.", stacklevel=2)


def _read(metric: nn.Module) -> dict[str, Any]:
    if isinstance(metric, MetricTracker):
        return {"steps": metric.n_steps}
    assert isinstance(metric, Metric)
    # This rank's own state, also between ``metric.sync()`` and ``unsync()``.
    before_sync = metric._cache if metric._is_synced else None
    states = dict(metric.metric_state if before_sync is None else before_sync)
    return {"count": metric.update_count, "states": states, "extra": _read_extra(metric)}


def _write(metric: Metric, saved: Mapping[str, Any]) -> None:
    for name, value in saved["states"].items():
        # A metric with compute_on_cpu keeps its lists on the CPU.
        device = torch.device("cpu") if isinstance(value, list) and metric.compute_on_cpu else metric.device
        setattr(metric, name, tree_map_only(Tensor, partial(Tensor.to, device=device, copy=True), value))
    set_update_count(metric, saved["count"])
    _write_extra(metric, saved["extra"])


def _mismatch(metric: Metric, saved: Mapping[str, Any]) -> str | None:
    """The reason that ``saved`` is no state of ``metric``, which was just reset, or None."""
    if "states" not in saved:
        return "is another kind of metric"
    defaults, states = metric.metric_state, saved["states"]
    if defaults.keys() != states.keys():
        return f"has states {sorted(defaults)}, but {sorted(states)} were saved"
    for name, default in defaults.items():
        value = states[name]
        # A reduction may turn a list into one tensor, and broadcasting may enlarge a default of size 1.
        if isinstance(default, Tensor) and not (isinstance(value, Tensor) and _grown(default, value)):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"has a state {name} of shape {tuple(default.shape)}, but {found} was saved"
    return None


def _grown(default: Tensor, value: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(default.shape, value.shape) == value.shape
    except RuntimeError:
        return False


def _merge(metric: Metric, parts: list[dict[str, Any]]) -> None:
    """Set ``metric`` to the states of several ranks, merged in their order."""
    _write(metric, parts[0])
    for position, part in enumerate(parts[1:], start=2):
        before, extra = metric.metric_state, _read_extra(metric)
        _write(metric, part)
        # merge_state takes the incoming state for the mean of `count - 1` updates. torchmetrics' mean across ranks
        # weights them equally, so the count is the number of ranks so far.
        set_update_count(metric, position)
        own_way = type(metric).merge_state is not Metric.merge_state
        if own_way or (metric.full_state_update is False and not metric.dist_sync_on_step):
            metric.merge_state(before)
        else:
            # merge_state, made for merging batches, refuses metrics whose updates need the full state. Their ranks are
            # merged by the same reductions, as in compute.
            metric._reduce_states(before)
        merges = {name: merge for name, (_, merge) in _extra_of(metric).items()}
        _write_extra(metric, {name: merge(extra[name], part["extra"][name]) for name, merge in merges.items()})
    set_update_count(metric, sum(part["count"] for part in parts))


def _why_not_mergeable(metric: Metric, saved: list[dict[str, Any]]) -> str | None:
    """The reason that a merge of ``saved`` fails, tried on a copy of ``metric``, or None."""
    if not saved or not saved[0]["states"]:
        return None
    trial = metric.clone()
    try:
        _merge(trial, [saved[0], saved[-1]])
    except Exception as error:  # user-written reductions may raise anything
        return f"can't be merged across ranks ({first_line(error)})"
    for name, value in trial.metric_state.items():
        one = saved[0]["states"][name]
        # Without a reduction torchmetrics stacks tensors, which `compute` can read but no further update.
        if isinstance(one, Tensor) and (not isinstance(value, Tensor) or value.dim() != one.dim()):
            return f"can't be merged across ranks (its state {name} has no reduction)"
    return None


_EXTRA: dict[type[Metric], dict[str, tuple[str, Callable[[Any, Any], Any]]]] = {
    Running: {"seen": ("_num_vals_seen", max)},  # Windows are merged slot by slot, as ranks update in step.
    MinMaxMetric: {"min": ("min_val", torch.minimum), "max": ("max_val", torch.maximum)},
}
"""Further attributes of torchmetrics' own wrappers, by saved name, and the merge of two ranks' values."""


def _extra_of(metric: Metric) -> dict[str, tuple[str, Callable[[Any, Any], Any]]]:
    return next((extra for kind, extra in _EXTRA.items() if isinstance(metric, kind)), {})


def _read_extra(metric: Metric) -> dict[str, Any]:
    extra = {name: getattr(metric, attribute) for name, (attribute, _) in _extra_of(metric).items()}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in extra.items()}


def _write_extra(metric: Metric, extra: Mapping[str, Any]) -> None:
    for name, (attribute, _) in _extra_of(metric).items():
        if name in extra:
            value = extra[name]
            setattr(metric, attribute, value.to(metric.device) if isinstance(value, Tensor) else value)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((fqn, child) for fqn, child in unwrapped_modules(module) if isinstance(child, (Metric, MetricTracker)))


def _copy(value: Any, copies: dict[int, Tensor]) -> Any:
    """A copy on the CPU. A tensor that several metrics share (compute groups) is copied once."""

    def copied(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in copies:
                copies[id(part)] = part.detach().to("cpu", copy=True)
            return copies[id(part)]
        if part is None or type(part) in (bool, int, float, str):
            return part
        raise TypeError(type(part).__name__)

    return tree_map(copied, value)


def set_update_count(metric: Metric, count: int) -> None:
    metric._update_count = count
