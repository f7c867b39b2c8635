"""What Lightning says of a run that is not so, or does not help."""

import logging
import re
import warnings
from functools import cache

from lightning.pytorch.utilities import rank_zero

# Of the two packages of Lightning the one that was imported last speaks for both.
_LOGGERS = [logging.getLogger(name) for name in (rank_zero.__name__, "pytorch_lightning.utilities.rank_zero")]


@cache
def leave_out_noise() -> None:
    """Let Lightning advertise nothing, not say that the Trainer's flag means autocast, where modules are cast, and not
    warn of its own calls of torch, in this process.
    """
    for logger in _LOGGERS:
        logger.addFilter(lambda record: not re.search(r"Tip: |Automatic Mixed Precision \(AMP\)", str(record.msg)))
    # Lightning 2.6 says this of itself on every rank.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Lightning says so wherever there is a SLURM; `check_launch` looks at what a job asked for.
    warnings.filterwarnings("ignore", message=r"The `srun` command is available on your system but is not used")
