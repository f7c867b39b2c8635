"""Everything that this package uses of Lightning's private names, and all that it replaces on live Lightning objects.

One module for each subject. A name that another version of Lightning lacks fails on import, of any of the modules, and
not in a training step: all are required here. What is replaced, on what and why is the table in ``replaced.py``;
every function that replaces something takes the run's `Replacements`, which put it back when the run ends.
"""

from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _Loop, _TrainingEpochLoop
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader

from lightning_shard.private_names import require

Loop = _Loop
DatasetSamplerWrapper = _DatasetSamplerWrapper
update_dataloader = _update_dataloader

_REQUIRED = (
    (Trainer, "_checkpoint_connector _data_connector _logger_connector _signal_connector"),
    (stock.BaseFinetuning, "_store"),
    (CombinedLoader, "_mode"),
    (LightningModule, "_apply_batch_transfer_handler _current_fx_name _device_mesh"),
    (LightningOptimizer, "_to_lightning_optimizer"),
    (stock.ModelCheckpoint, "file_exists _link_checkpoint _every_n_train_steps _monitor_candidates"),
    (stock.ModelCheckpoint, "_save_last_checkpoint _save_topk_checkpoint _should_skip_saving_checkpoint"),
    (stock.ModelSummary, "_summary _max_depth"),
    (stock.StochasticWeightAveraging, "_average_model _clear_schedulers _device _init_n_averaged"),
    (stock.StochasticWeightAveraging, "_latest_update_epoch _scheduler_state"),
    (stock.WeightAveraging, "_average_model _copy_average_to_current _device _kwargs _swap_models _use_buffers"),
    (TensorBoardLogger, "_log_graph"),
    (ParallelStrategy, "_layer_sync"),
    (_CheckpointConnector, "resume_start"),
    (_DataConnector, "_prepare_dataloader _requires_distributed_sampler"),
    (_DatasetSamplerWrapper, "_sampler"),
    (_EvaluationLoop, "inference_mode _results"),
    (_FitLoop, "_can_stop_early _combined_loader_states_to_load _data_fetcher _data_source _should_accumulate"),
    (_FitLoop, "_combined_loader _last_train_dl_reload_epoch _skip_backward"),
    (_LoggerConnector, "_callback_metrics _first_loop_iter"),
    (_Loop, "_restarting"),
    (_SignalConnector, "register_signal_handlers teardown"),
    (_TrainingEpochLoop, "_batches_that_stepped _broadcast_sigterm_tensor _is_training_done _skip_next_val"),
    (_TrainingEpochLoop, "_num_ready_batches_reached _results _should_accumulate _should_check_val_fx"),
    (_TrainingEpochLoop, "on_advance_end update_lr_schedulers"),
)
for _owner, _names in _REQUIRED:
    require(_owner, _names, tested="lightning 2.6.4 to 2.6.6")
