"""Everything that this package uses of Lightning's private names, and all that it replaces on live Lightning objects.

One module for each subject. A name that another version of Lightning lacks fails here, on import, and not in a training
step. What is replaced, on what and why is the table in ``replaced.py``; every function that replaces something takes
the run's `Replacements`, which put it back when the run ends.
"""

# The imports are the contents.
# ruff: noqa: F401

from lightning_shard._lightning.averaging import (
    average_shards,
    averages_place,
    averaging_callbacks,
    collects_statistics,
    evaluates_average,
    leave_out_copies,
    own_averaging_hooks,
    recount_averages,
)
from lightning_shard._lightning.callbacks import (
    callbacks,
    count_sharded_parameters,
    let_errors_through,
    watches_zero_grad,
)
from lightning_shard._lightning.checkpoints import choose_checkpoint, let_checkpoints_wait, save_between_steps
from lightning_shard._lightning.loaders import keep_order, prepare_loader, recount_batches, train_batch_size
from lightning_shard._lightning.loops import (
    after_each_batch,
    at_end_of_run,
    begins_accumulation,
    follow_actions,
    leave_signals_alone,
    prediction_batches,
    should_accumulate,
    use_no_grad_in_evaluation,
    validate_by_one_clock,
)
from lightning_shard._lightning.messages import leave_out_amp_message, leave_out_noise
from lightning_shard._lightning.optimizers import (
    full_gradient_norms,
    hold_schedulers,
    is_missing_optimizer,
    step_scheduler,
    wrapped,
)
from lightning_shard._lightning.processes import (
    DDPForwardRedirection,
    destroy_at_exit,
    init_process_group,
    launcher,
    layer_sync,
    let_children_end,
    prepare_for_backward,
    set_device,
    set_device_mesh,
    set_rank,
    sync_reduce,
)
from lightning_shard._lightning.progress import (
    count_validation_anew,
    end_epoch,
    mark_after_batch,
    mark_before_validation,
    nothing_follows,
    restore_steps,
    saved_after_batch,
    settle_progress,
    settle_validation,
    validation_follows,
)
from lightning_shard._lightning.replaced import Replacements
from lightning_shard._lightning.results import log_full_values, restore_training_results, training_results_state
