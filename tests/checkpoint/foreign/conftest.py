"""Directories of stock Lightning and DeepSpeed, saved once for all tests of other forms."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoint.foreign.stock import save_deepspeed, save_stock
from tests.harness import run_distributed


@pytest.fixture(scope="session")
def stock_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fsdp``, ``zero2`` and ``zero3``, of two ranks."""
    folder = tmp_path_factory.mktemp("stock")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_distributed(save_stock, 2, "fsdp", str(folder / "fsdp"))
    return folder


@pytest.fixture(scope="session")
def deepspeed_tensors(stock_folders: Path) -> dict[int, dict[str, Tensor]]:
    """Stage to key to tensor, as DeepSpeed's own API gives them, of ``zero2`` and ``zero3`` in `stock_folders`."""
    return {
        stage: run_distributed(save_deepspeed, 2, stage, False, str(stock_folders / f"zero{stage}"), timeout=300)[0]
        for stage in (2, 3)
    }
