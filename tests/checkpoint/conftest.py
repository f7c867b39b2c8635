"""A trained checkpoint, and the check that nothing in any checkpoint ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.calls import save_module
from tests.checkpoint.hostile import RAN
from tests.checkpoint.nets import build, step


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of a small trained module with tied, frozen, empty and scalar tensors."""
    net, optimizer = build("plain", 0)
    step(net, optimizer)
    state = {"epoch": 3, "global_step": 2, "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"at": 5}]}}}}
    path = tmp_path / "trained.ckpt"
    save_module(path, module=net, optimizers=[optimizer], trainer_state=state)
    return path


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    """Of all that a test opens, nothing ran."""
    RAN.clear()
    yield
    assert RAN == []
