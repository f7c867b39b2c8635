"""A tensor in the state of a rank that is small in the file and large in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.load import open_checkpoint, with_own_states
from lightning_shard.errors import CheckpointError
from tests.checkpoint.calls import FACTS, save_module
from tests.checkpoint.nets import build, step
from tests.checkpoint.test_safety import forge

OWN = {"rng": {"torch": torch.ones(3)}, "metrics": {}, "loaders": [{"at": (5, 6)}]}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    facts = type(FACTS)(engine="e", policy="p", run={"name": "mine", "step": 1, "time": 0.0})
    state = {"epoch": 3, "global_step": 2, "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"at": (5, 6)}]}}}}
    state["lightning_shard"] = {"seed": 1}
    save_module(folder / "a.ckpt", module=net, optimizers=[optimizer], trainer_state=state, own_state=OWN, facts=facts)
    return folder


def ends_with(file: Path, own: bytes) -> None:
    """Put the state of a rank at a file's end."""
    data = file.read_bytes()
    boxes = data[: -8 - int.from_bytes(data[-8:], "little")]
    forge(file.parent, file.name, boxes + own + len(own).to_bytes(8, "little"))


def test_a_tensor_of_a_rank_that_repeats_its_values_is_refused(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "a")
    path = tmp_path / "a" / "a.ckpt"
    torch.save({**OWN, "rng": torch.ones(1).expand(2**40)}, tmp_path / "own")
    ends_with(path / "__0_0.distcp", (tmp_path / "own").read_bytes())
    with pytest.raises(CheckpointError, match="a tensor of many more"):
        with_own_states(open_checkpoint(path))
