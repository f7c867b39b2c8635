"""Checksums of files over blocks, by threads."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from lightning_shard.checkpoint.files import hashing
from lightning_shard.checkpoint.files.hashing import FileHash
from lightning_shard.checkpoint.files.layout import open_directory
from lightning_shard.checkpoint.files.tensor_files import HashedFile
from lightning_shard.errors import CheckpointCorruptError

BLOCK = 1 << 20


def _expected(data: bytes) -> str:
    if len(data) <= BLOCK:
        return hashlib.sha256(data).hexdigest()
    digests = [hashlib.sha256(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK)]
    return hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.parametrize("size", [0, BLOCK, BLOCK + 1, 3 * BLOCK + 12345])
def test_the_parts_in_which_a_file_is_written_do_not_matter(size: int) -> None:
    draw = random.Random(size)
    data = draw.randbytes(size)
    parts, at = FileHash(BLOCK), 0
    while at < size:
        more = draw.choice([1, 1000, 300_000, BLOCK, 2 * BLOCK + 7])
        parts.begin_update(data[at : at + more])
        at += more
    assert parts.entry() == (_expected(data), BLOCK if size > BLOCK else 0)


def test_a_changed_byte_of_a_long_file_is_found(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2 * hashing.BLOCK + 5)
    with HashedFile(tmp_path / "a") as stream:
        stream.write(data)
    directory = open_directory(tmp_path)
    assert stream.entry().block == hashing.BLOCK
    directory.check("a", stream.entry())
    (tmp_path / "a").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointCorruptError, match="does not match its checksum"):
        directory.check("a", stream.entry())
