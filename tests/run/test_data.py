"""What a checkpoint keeps of each rank."""

from __future__ import annotations

import io
from typing import Any

import torch

from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.resume.rng import rng_state
from lightning_shard.run.data import _each_once


def test_generators_that_are_equal_on_ranks_are_in_the_file_once() -> None:
    torch.manual_seed(1)
    common = rng_state()
    torch.manual_seed(2)
    states: list[dict[str, Any]] = [
        {"rng": {**common, "torch": common["torch"].clone()}, "loaders": [], "metrics": {}} for _ in range(32)
    ]
    states[5]["rng"]["torch"] = torch.get_rng_state()
    data = encode_trainer_state({"ranks": _each_once(states)})
    found = torch.load(io.BytesIO(data), weights_only=True)["ranks"]
    assert [torch.equal(each["rng"]["torch"], common["torch"]) for each in found] == [n != 5 for n in range(32)]
    assert all(torch.equal(each["rng"]["numpy"][1], common["numpy"][1]) for each in found)
    one, all_apart = (len(encode_trainer_state({"ranks": each})) for each in (states[:1], states))
    assert len(data) < 3 * one < all_apart
