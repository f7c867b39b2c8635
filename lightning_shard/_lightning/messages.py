"""Filters for messages of libraries that are wrong or don't help here, and messages above Lightning's progress bar."""

import logging
import re
import warnings
from functools import cache

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero

# Of Lightning's two packages the one that was imported last logs for both.
_LOGGERS = [logging.getLogger(name) for name in (rank_zero.__name__, "pytorch_lightning.utilities.rank_zero")]


def print_above_bar(trainer: Trainer, text: str) -> None:
    """Log ``text`` on rank 0, above the progress bar if there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        if trainer.is_global_zero:
            bar.print(text)
    else:
        rank_zero.rank_zero_info(text)


@cache
def filter_messages() -> None:
    """In this process, drop advertisements, Lightning's note that the precision flag means autocast (here modules are
    cast), and warnings of libraries' own calls of torch.
    """
    for logger in _LOGGERS:
        logger.addFilter(lambda record: not re.search(r"Tip: |Automatic Mixed Precision \(AMP\)", str(record.msg)))
    # DeepSpeed's import reports a missing GPU, also for planning and migrating.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    # Lightning 2.6 causes this warning itself, on every rank.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # DeepSpeed calls these two. The warning's place is torch's decorator.
    deprecated = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    # Lightning warns on every machine with SLURM. `check_launch` compares the job's own settings.
    warnings.filterwarnings("ignore", message=r"The `srun` command is available on your system but is not used")
