"""Random generators put back as they were."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def undone_randomness() -> Generator[None, None, None]:
    """Whatever is drawn inside, the states of torch's, Python's and NumPy's generators are the same afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, legacy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(legacy)
