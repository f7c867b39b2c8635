"""Checksums of files: sha256 of a short file, and for a long one sha256 of the digests of its blocks.

Several threads hash blocks while the file is written or read, because one thread hashes only 1 to 2 GB/s.
"""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

BLOCK = 1 << 24
"""Bytes of a block. A file of at most one block has a plain sha256."""

LEAST_BLOCK = 1 << 20
"""Smallest block that is accepted when reading."""

_AT_ONCE = 1 << 18  # bytes from which another thread hashes


class FileHash:
    """The checksum of one file. Its bytes are given in order."""

    def __init__(self, block: int = BLOCK) -> None:
        """Hash blocks of ``block`` bytes, or with 0 the whole file by one thread, as formats up to 8 do."""
        self._block, self._filled = block, 0
        self._hashes = [hashlib.sha256()]
        self._last: Future[None] | None = None  # of the last block
        # Threads start with their first work.
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checksum")

    def begin_update(self, data: Any) -> list["Future[None]"]:
        """Start hashing ``data``, which must not change until the returned jobs are done."""
        rest, jobs = memoryview(data).cast("B"), list[Future[None]]()
        while len(rest):
            if self._block and self._filled == self._block:
                self._hashes.append(hashlib.sha256())
                self._filled, self._last = 0, None
            if self._last is not None:
                self._last.result()
            part = rest[: self._block - self._filled] if self._block else rest
            self._filled += len(part)
            rest = rest[len(part) :]
            if len(part) < _AT_ONCE:
                self._hashes[-1].update(part)
            else:
                jobs.append(last := self._threads.submit(self._hashes[-1].update, part))
                self._last = last
        return jobs

    def entry(self) -> tuple[str, int]:
        """Return the checksum as hexadecimal digits, and the bytes of its blocks, 0 for a plain sha256."""
        self._threads.shutdown()
        first, *others = self._hashes
        if not others:
            return first.hexdigest(), 0
        return hashlib.sha256(b"".join(part.digest() for part in self._hashes)).hexdigest(), self._block
