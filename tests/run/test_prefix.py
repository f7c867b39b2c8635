"""Messages say which rank they come from, while a run goes on and not after it."""

from __future__ import annotations

import logging
import warnings

import pytest

from lightning_shard.run.processes import install_prefix, rank_prefix


def test_only_ranks_other_than_0_of_several_have_one() -> None:
    assert rank_prefix(3, 8, "node07") == "[rank 3 on node07] "
    assert rank_prefix(0, 8, "node07") == rank_prefix(0, 1, "node07") == ""


def test_log_lines_and_warnings_have_it_until_it_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory(), warnings.formatwarning
    undo = install_prefix(rank_prefix(3, 8, "node07"))
    log = logging.getLogger("some.users.own")
    log.warning("%d %% of the disk is free", 7)
    log.warning("100 % sure")
    shown = warnings.formatwarning(UserWarning("careful"), UserWarning, "file.py", 1)
    undo()
    log.warning("after it")
    assert caplog.messages == [
        "[rank 3 on node07] 7 % of the disk is free",
        "[rank 3 on node07] 100 % sure",
        "after it",
    ]
    assert shown.startswith("[rank 3 on node07] file.py:1: UserWarning: careful")
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before


def test_undoing_leaves_alone_what_was_wrapped_around_it() -> None:
    before = logging.getLogRecordFactory()
    undo = install_prefix("[rank 1 on a] ")
    inner = logging.getLogRecordFactory()
    outer = lambda *args, **kwargs: inner(*args, **kwargs)  # noqa: E731
    logging.setLogRecordFactory(outer)
    try:
        undo()
        assert logging.getLogRecordFactory() is outer
    finally:
        logging.setLogRecordFactory(before)
