"""An optimizer step that a checkpoint is saved in the middle of: what it has so far, and how a run goes on with it.

A step averages the gradients of ranks x micro-batches x samples. Where a run goes on after as many samples of its step,
on whatever ranks, the gradients so far are part of the step; they are rescaled where that takes another number.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard._lightning.loaders import train_batch_size
from lightning_shard._lightning.loops import accumulated_batches
from lightning_shard.run.checkpoints import ACCUMULATION, Checkpoints


def state(trainer: Trainer) -> dict[str, Any]:
    """This rank's part of what a checkpoint keeps of the step, beside gradients; empty between two steps."""
    plugin: Any = trainer.precision_plugin
    if not trainer.lightning_module.automatic_optimization and plugin.backward_pending:
        rank_zero_warn(
            "This checkpoint is saved after a manual_backward that no optimizer step has followed. What steps manual "
            "optimization makes of its batches is not known, so that these gradients are not saved, and the step after "
            "resuming lacks them. Save after a step."
        )
    if not (batches := accumulated_batches(trainer)):
        return {}
    return {ACCUMULATION: {"batches": batches, "factors": _factors(trainer), **plugin.accumulation(trainer)}}


def _factors(trainer: Trainer) -> list[int]:
    """Ranks, samples of a micro-batch, 1 where only a hook knows, and micro-batches of a step."""
    return [trainer.world_size, train_batch_size(trainer) or 1, trainer.accumulate_grad_batches]


def resume(trainer: Trainer, ranks: Sequence[Mapping[str, Any]], checkpoints: Checkpoints) -> None:
    """Go on in the middle of a step, if the checkpoint is of one; ``ranks`` is the state that it keeps of each.

    All ranks call it. Where gradients are lacking, or are of no part of the step here, a warning says so.
    """
    if (saved := ranks[0].get(ACCUMULATION)) is None:
        return
    here = _factors(trainer)
    done, due = saved["batches"] * prod(saved["factors"][:2]), accumulated_batches(trainer) * prod(here[:2])
    rule = "{} ranks x batch size {} x accumulate_grad_batches {}"
    if checkpoints.accumulated is None:
        why = "it has none"
    elif done != due:
        why = f"the step had taken {done} samples ({rule.format(*saved['factors'])}), here {due} ({rule.format(*here)})"
    else:
        plugin: Any = trainer.precision_plugin
        factor = plugin.resume_accumulation([rank[ACCUMULATION] for rank in ranks])
        checkpoints.load_gradients(factor * prod(saved["factors"]) / prod(here))
        return
    rank_zero_warn(
        f"The checkpoint was saved after {saved['batches']} of the {saved['factors'][2]} batches that one step "
        f"accumulates. The step that comes lacks their gradients, because {why}. Resume with the same numbers from the "
        "directory that was saved, or from one that was saved after a step."
    )
