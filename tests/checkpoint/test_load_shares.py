"""Which rank hashes which file of a checkpoint that is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_shard.checkpoint.load import _share
from lightning_shard.ranks import Ranks


@dataclass
class _File:
    size: int


@dataclass
class _Manifest:
    files: dict[str, Any]
    format_version: int = 8


@pytest.mark.parametrize("size", [1, 3, 64])
def test_every_file_is_one_ranks_and_the_bytes_are_even(size: int) -> None:
    files = {f"__{i}_0.distcp": _File(1000 + 7 * i) for i in range(200)}
    shares = [_share(_Manifest(files), Ranks(group=None, rank=rank, size=size)) for rank in range(size)]  # type: ignore[arg-type]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(file.size for file in files.values())
