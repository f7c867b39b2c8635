"""Saves and loads of the runs in `tests.checkpoint.flat`, and what is compared of them."""

from __future__ import annotations

from typing import Any

from lightning_shard.checkpoint.matching import LoadReport
from tests.checkpoint.calls import load_module, save_module
from tests.checkpoint.flat import Run


def save_run(run: Run, path: str) -> None:
    optimizers = [run.optimizer]
    save_module(path, module=run.net, optimizers=optimizers, masters=run.masters, trainer_state={"epoch": 1})


def load_run(run: Run, path: str, **kwargs: Any) -> LoadReport:
    return load_module(path, module=run.net, optimizers=[run.optimizer], masters=run.masters, **kwargs)[1]
