"""All private names of Lightning that this package uses, and all attributes that it replaces on live Lightning objects.

The names are required here, so that a version of Lightning without one fails when any module of this folder is
imported. `REPLACED` lists the replaced attributes with reasons. The run's `Replacements` restore them when it ends.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loops import evaluation_loop, fit_loop, loop, training_epoch_loop
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors import checkpoint_connector, data_connector, signal_connector
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_shard.private_names import require

_REQUIRED = (
    (Trainer, "_checkpoint_connector _data_connector _signal_connector"),
    (CombinedLoader, "_mode"),
    (LightningModule, "_current_fx_name _device_mesh"),
    (stock.ModelCheckpoint, "file_exists _link_checkpoint _every_n_train_steps"),
    (stock.ModelSummary, "_max_depth _summary"),
    (ParallelStrategy, "_layer_sync"),
    # Modules, for the private classes in them.
    (checkpoint_connector, "_loaded_checkpoint resume_start"),
    (data_connector, "_resolve_sampler"),
    (evaluation_loop, "_data_source _has_run _results"),
    (fit_loop, "_combined_loader_states_to_load _data_fetcher _data_source"),
    (fit_loop, "_combined_loader _last_train_dl_reload_epoch _last_val_time"),
    (loop, "_restarting"),
    (signal_connector, "register_signal_handlers"),
    (training_epoch_loop, "_batches_that_stepped _broadcast_sigterm_tensor _results _skip_next_val"),
    (training_epoch_loop, "_should_check_val_fx on_advance_end"),
)
for _owner, _names in _REQUIRED:
    require(_owner, _names)


REPLACED = {
    "LightningModule.log": "values of sharded tensors are logged in full",
    "LightningModule.lr_scheduler_step": "schedules that monitor a value get rank 0's, skipped steps step no schedule",
    "Logger.log_graph": "the graph is drawn before the model is sharded",
    "ModelCheckpoint._link_checkpoint": "a link to a checkpoint that is still being written is made once it is full",
    "ModelCheckpoint.file_exists": "the name of a checkpoint that is still being written is taken",
    "ModelCheckpoint.on_train_batch_end": "saves come after an optimizer step and the module's own hook",
    "ModelCheckpoint.on_validation_end": "likewise",
    "ModelSummary._summary": "Lightning counts parameters that ZeRO-3 has sharded under its own strategy alone",
    "Trainer.profiler": "the main thread's actions are noted, and a meter sums up the seconds of some",
    "_CheckpointConnector.resume_start": "a run resumes from its own checkpoints",
    "_DataConnector._resolve_sampler": "training dataloaders keep their order",
    "_SignalConnector.register_signal_handlers": "this package's own handlers only note a signal",
    "_TrainingEpochLoop._broadcast_sigterm_tensor": "nothing reads the signals that Lightning's handlers note",
    "_TrainingEpochLoop.max_steps": "a validation that was interrupted runs although the last step is done",
    "_TrainingEpochLoop.on_advance_end": "a run is stopped between a batch and the validation after it",
    "_TrainingEpochLoop.reset": "a run that goes on at an epoch's end runs no batch before it",
}
"""Class and attribute, with the reason. `Replacements` refuses anything else."""

_NOTHING = object()


class Replacements:
    """The attributes of Lightning objects that one run has replaced. Nothing else in this package sets one."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``, an entry of `REPLACED`, on the instance."""
        listed = [f"{cls.__name__}.{name}" in REPLACED for cls in type(owner).__mro__]
        assert any(listed), f"{type(owner).__name__}.{name} is not in REPLACED"
        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = value

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace the method ``owner.name`` by ``call``, which gets the original as its first argument."""
        self.replace(owner, name, partial(call, getattr(owner, name)))

    def restore(self, owner: Any = None, name: str = "") -> None:
        """Restore replaced attributes, the last first, or only ``owner.name`` if it was replaced."""
        before, self._before = self._before, []
        for entry in reversed(before):
            if owner is not None and not (entry[0] is owner and entry[1] == name):
                self._before.insert(0, entry)
            elif entry[2] is _NOTHING:
                vars(entry[0]).pop(entry[1], None)
            elif entry[1] in vars(entry[0]):  # else it was put back by one that replaced it before
                vars(entry[0])[entry[1]] = entry[2]
