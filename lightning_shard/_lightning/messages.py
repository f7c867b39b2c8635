"""What Lightning says of a run that is not so, or does not help."""

import inspect
import logging
import warnings
from functools import cache

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero

# Of the two packages of Lightning the one that was imported last speaks for both.
_LOGGERS = [logging.getLogger(name) for name in (rank_zero.__name__, "pytorch_lightning.utilities.rank_zero")]


@cache
def leave_out_noise() -> None:
    """Let Lightning advertise nothing, and not warn of its own calls of torch, in this process."""
    for logger in _LOGGERS:
        logger.addFilter(lambda record: "Tip: " not in str(record.msg))
    # Lightning 2.6 says this of itself on every rank with torch 2.13.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Lightning says so wherever there is a SLURM; `check_launch` looks at what a job asked for.
    warnings.filterwarnings("ignore", message=r"The `srun` command is available on your system but is not used")


@cache
def leave_out_amp_message(kind: type[Strategy]) -> None:
    """Let Lightning not say that strategies of class ``kind`` use autocast, where they cast modules instead. It says so
    for the Trainer's flag alone: whose strategy that is for is found on the stack.
    """

    def is_true(record: logging.LogRecord) -> bool:
        if "Automatic Mixed Precision (AMP)" not in str(record.msg):
            return True
        frame = inspect.currentframe()
        while frame is not None and not hasattr(frame.f_locals.get("self"), "strategy"):
            frame = frame.f_back
        return frame is None or not isinstance(frame.f_locals["self"].strategy, kind)

    leave_out_noise()
    for logger in _LOGGERS:
        logger.addFilter(is_true)
