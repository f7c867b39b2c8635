"""States of random number generators: saved, gathered from all ranks, and derived."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_shard.resume.rng import derived_rng_seed, rng_state, seed_rng, set_rng_state
from tests.resume.support import through_file


def test_rng_state_survives_a_file() -> None:
    seed_rng(11)
    np.random.randn()  # leaves numpy with a cached second value
    random.gauss(0, 1)
    state = through_file(rng_state())

    def draws() -> Any:
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()

    first = draws()
    assert draws() != first
    set_rng_state(state)
    assert draws() == first


def test_a_derived_seed_is_the_same_on_every_machine() -> None:
    # sha256("lightning_shard/1/2/3")[:4], little-endian
    assert derived_rng_seed(1, 2, 3) == 765159309
