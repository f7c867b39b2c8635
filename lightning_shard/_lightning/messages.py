"""Messages of Lightning that are not so, or do not help, and own ones beside its progress bar."""

import logging
import re
import warnings
from functools import cache

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero

# Of the two packages of Lightning the one that was imported last speaks for both.
_LOGGERS = [logging.getLogger(name) for name in (rank_zero.__name__, "pytorch_lightning.utilities.rank_zero")]


def say(trainer: Trainer, text: str) -> None:
    """Log ``text`` on rank 0, above the progress bar where there is one."""
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        if trainer.is_global_zero:
            bar.print(text)
    else:
        rank_zero.rank_zero_info(text)


@cache
def leave_out_noise() -> None:
    """Let Lightning advertise nothing, not say that the Trainer's flag means autocast, where modules are cast, and not
    warn of its own calls of torch, in this process.
    """
    for logger in _LOGGERS:
        logger.addFilter(lambda record: not re.search(r"Tip: |Automatic Mixed Precision \(AMP\)", str(record.msg)))
    # DeepSpeed says when it is imported that there is no GPU, on machines that plan and migrate too.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    # Lightning 2.6 says this of itself on every rank.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # DeepSpeed calls these two, and torch's decorator is where the warning says it is from.
    deprecated = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    # Lightning says so wherever there is a SLURM; `check_launch` looks at what a job asked for.
    warnings.filterwarnings("ignore", message=r"The `srun` command is available on your system but is not used")
