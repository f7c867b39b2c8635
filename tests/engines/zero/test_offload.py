"""The folders of state that is offloaded to NVMe."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_shard.engines.zero.offload import remove_run_folders
from lightning_shard.ranks import Ranks
from tests.harness import run_distributed

TIMES = 20_000  # In some of them a rank meets the other in the middle of its look.


def _clean_up(root: str) -> None:
    """One rank cleans up while the other one's folders come and go."""
    folder = Path(root) / "run"
    inside = folder / "zero_stage_3" / "float16"
    Ranks.of().barrier()
    for _ in range(TIMES):
        if Ranks.of().is_first:
            remove_run_folders([folder])
            continue
        with suppress(OSError):
            os.makedirs(inside)
        for empty in (inside, inside.parent):
            with suppress(OSError):
                os.rmdir(empty)


@pytest.mark.matrix
def test_ranks_that_end_together_do_not_stumble_over_each_other(tmp_path: Path) -> None:
    run_distributed(_clean_up, 2, str(tmp_path))
    remove_run_folders([tmp_path / "run"])
    assert not (tmp_path / "run").exists()
