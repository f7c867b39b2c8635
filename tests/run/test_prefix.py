"""Messages say which rank they come from, while a run goes on and not after it."""

from __future__ import annotations

import logging
import socket
import warnings
from contextlib import ExitStack

import pytest

from lightning_shard.run.processes import RunWatch, prefixed


def test_log_lines_and_warnings_have_it_on_ranks_other_than_0_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory(), warnings.formatwarning
    watch, log = RunWatch(None, None, lambda code: None), logging.getLogger("some.users.own")
    for rank, size in ((0, 8), (0, 1)):
        watch.mark_messages(rank, size)
        log.warning("of the run")
    watch.mark_messages(3, 8)
    log.warning("%d %% of the disk is free", 7)
    log.warning("100 % sure")
    shown = warnings.formatwarning(UserWarning("careful"), UserWarning, "file.py", 1)
    watch.end()
    log.warning("after it")
    prefix = f"[rank 3 on {socket.gethostname()}] "
    of_rank = [f"{prefix}7 % of the disk is free", f"{prefix}100 % sure"]
    assert caplog.messages == ["of the run", "of the run", *of_rank, "after it"]
    assert shown.startswith(f"{prefix}file.py:1: UserWarning: careful")
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before


def test_undoing_leaves_alone_what_was_wrapped_around_it() -> None:
    before = logging.getLogRecordFactory()
    installed = ExitStack()
    installed.enter_context(prefixed("[rank 1 on a] "))
    inner = logging.getLogRecordFactory()
    outer = lambda *args, **kwargs: inner(*args, **kwargs)  # noqa: E731
    logging.setLogRecordFactory(outer)
    try:
        installed.close()
        assert logging.getLogRecordFactory() is outer
    finally:
        logging.setLogRecordFactory(before)
