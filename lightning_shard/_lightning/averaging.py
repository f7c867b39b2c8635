"""Lightning's callbacks that average weights, given this rank's shards where they would look at the whole module."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_shard._lightning.callbacks import callbacks
from lightning_shard._lightning.replaced import Replacements

_HOOKS = {WeightAveraging: ("setup", "on_load_checkpoint"), StochasticWeightAveraging: ("setup",)}
"""Hooks that copy or load a whole module."""


class Shards(Protocol):
    """What this rank has of a module."""

    def current(self) -> nn.Module:
        """Its boxes of the module's parameters and buffers, live, as a module's."""

    def write(self, change: Callable[[nn.Module], None], *, swaps: bool = False) -> None:
        """Have ``change`` write into `current`, and the next forward see it; ``swaps``: a second time undoes it."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """What a callback averages into."""

    shards: nn.Module  # Copies of the boxes in `Shards.current`, in the same order.
    has_buffers: bool  # Whether the buffers are averaged, or follow the module's; else those here mean nothing.
    count: Callable[[], int]  # How many updates are in it.
    set_count: Callable[[int], object]


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    return [c for c in callbacks(trainer) if isinstance(c, tuple(_HOOKS))]


def averages_place(callbacks: Any) -> str | None:
    """Where those of these callbacks that average weights keep the averages; None: there are no such callbacks.

    "beside" what is averaged, or on the "host".
    """
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    for callback in given:
        if isinstance(callback, tuple(_HOOKS)):
            return "host" if str(vars(callback)["_device"]).startswith("cpu") else "beside"
    return None


def evaluates_average(trainer: Trainer) -> bool:
    """Whether a checkpoint's averages are evaluated, as those of Lightning's are, and not its weights."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    return not fitting and any(isinstance(c, WeightAveraging) for c in callbacks(trainer))


def collects_statistics(trainer: Trainer) -> bool:
    """Whether ``StochasticWeightAveraging`` makes its last pass over the data, for batch norms, without gradients."""
    return trainer.fit_loop._skip_backward


def go_on_in_mid_epoch(trainer: Trainer) -> None:
    """In a fit that resumes in mid-epoch: have ``StochasticWeightAveraging`` do what it does at an epoch's start.

    It makes its scheduler there, which sets the learning rates; those of the checkpoint stay.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    for callback in averaging_callbacks(trainer):
        if isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
            groups = trainer.optimizers[0].param_groups
            kept = [(group["lr"], group.get("initial_lr")) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, (lr, initial_lr) in zip(groups, kept, strict=True):
                group.update(lr=lr, initial_lr=initial_lr)


def own_averaging_hooks(callback: Callback) -> list[str]:
    """Names of the replaced hooks that a subclass has its own of, which would not be called."""
    stock = [(cls, name) for cls, names in _HOOKS.items() if isinstance(callback, cls) for name in names]
    return [name for cls, name in stock if getattr(type(callback), name) is not getattr(cls, name)]


def recount_averages(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """In a fit that goes back to ``checkpoint``, count updates of averages from there on."""
    for callback in averaging_callbacks(trainer):
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is not None and isinstance(callback, WeightAveraging):
            callback.load_state_dict(state)
        elif state is not None and callback.n_averaged is not None:
            callback.n_averaged.fill_(state["n_averaged"])
            callback._latest_update_epoch = state["latest_update_epoch"]


def leave_out_copies(replacements: Replacements, trainer: Trainer) -> None:
    """Before the callbacks are set up: keep them from copying the module, and from loading what is in no state dict."""
    for callback in averaging_callbacks(trainer):
        for cls, names in _HOOKS.items():
            for name in names if isinstance(callback, cls) else ():
                replacements.replace(callback, name, lambda *args, **kwargs: None)


class _Average(AveragedModel):
    """torch's average of what ``current`` gives, whatever module it is asked for."""

    def __init__(self, current: Callable[[], nn.Module], device: Any, **options: Any) -> None:
        super().__init__(current(), device, **options)
        # Beside the tensors, as torch does for a model's device.
        self.n_averaged = self.n_averaged.to(next(iter(self.module.parameters()), self.n_averaged).device)
        self._current = current

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(self._current())


def average_shards(replacements: Replacements, trainer: Trainer, shards: Shards) -> Average:
    """Have the Trainer's averaging callback, of which there is one, average ``shards``."""
    (callback,) = averaging_callbacks(trainer)
    if isinstance(callback, StochasticWeightAveraging):
        return _stochastic(replacements, trainer, callback, shards)
    averages = _Average(shards.current, callback._device, use_buffers=callback._use_buffers, **callback._kwargs)
    swap, copy = callback._swap_models, callback._copy_average_to_current
    replacements.replace(callback, "_average_model", averages)
    replacements.replace(callback, "_swap_models", lambda module: shards.write(swap, swaps=True))
    replacements.replace(callback, "_copy_average_to_current", lambda module: shards.write(copy))
    number = averages.n_averaged
    count, set_count = lambda: int(number), lambda n: number.fill_(n)
    return Average(shards=averages.module, has_buffers=True, count=count, set_count=set_count)


def _stochastic(replacements: Replacements, trainer: Trainer, callback: Any, shards: Shards) -> Average:
    average = deepcopy(shards.current())
    if callback._device is not None:
        average.to(callback._device)
    update, transfer, load = callback.update_parameters, callback.transfer_weights, callback.load_state_dict

    def load_state_dict(state: dict[str, Any]) -> None:
        load(state)
        # Lightning does so ahead of its own loading, which comes later here: a scheduler of another kind is to go on.
        if callback._scheduler_state is not None:
            callback._clear_schedulers(trainer)

    def count() -> int:
        return callback._init_n_averaged if callback.n_averaged is None else int(callback.n_averaged)

    replacements.replace(callback, "_average_model", average)
    replacements.replace(callback, "load_state_dict", load_state_dict)
    replacements.replace(callback, "update_parameters", lambda to, _, n, fn: update(to, shards.current(), n, fn))
    replacements.replace(callback, "transfer_weights", lambda to, _: shards.write(lambda into: transfer(to, into)))
    # The callback's own state has the number.
    return Average(shards=average, has_buffers=False, count=count, set_count=lambda n: None)
