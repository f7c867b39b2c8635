"""Iterable data sets: those with state go on after what was used, those without are left alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import (
    DataLoader,
)

from lightning_shard.resume.wrap import order_warning, resumable
from tests.resume.support import Numbers, StatefulStream, Stream, ids, through_file


class Asking(StatefulStream):
    """As MosaicML's StreamingDataset, whose loader knows what to say."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
        return {"at": num_samples}


def test_iterable_without_state_is_left_alone_and_warned_of() -> None:
    stock = DataLoader(Stream(5), 2)
    assert resumable(stock, world_size=1, rank=0) is stock
    warning = order_warning(stock)
    assert warning is not None
    assert "Stream is iterable and has no state_dict" in warning
    asking = DataLoader(Asking(5), 2)
    assert resumable(asking, world_size=1, rank=0) is asking
    assert "Asking is iterable and has no state_dict()" in str(order_warning(asking))
    in_workers = DataLoader(StatefulStream(5), 2, num_workers=1)
    assert resumable(in_workers, world_size=1, rank=0) is in_workers
    assert "num_workers=0" in str(order_warning(in_workers))
    assert order_warning([1, 2]) is not None
    unordered = resumable(DataLoader(Numbers(4), num_workers=2, in_order=False), world_size=1, rank=0)
    assert "in_order" in str(order_warning(unordered))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("used", [0, 3])
def test_iterable_with_state_goes_on_after_what_was_used(lookahead: int, used: int) -> None:
    loader = resumable(DataLoader(StatefulStream(7), 2), world_size=1, rank=0)
    assert order_warning(loader) is None
    assert loader.lookahead == 1
    loader.lookahead = lookahead
    iterator = iter(loader)
    seen = ids(itertools.islice(iterator, used + lookahead))[:used]
    resumed = resumable(DataLoader(StatefulStream(7), 2), world_size=1, rank=0)
    resumed.load_state_dict(through_file(loader.state_dict()))
    assert resumed.state_dict()["batches"] == used
    assert seen + ids(resumed) == [[0, 1], [2, 3], [4, 5], [6]]
    assert ids(resumed) == [[0, 1], [2, 3], [4, 5], [6]]


def test_iterable_to_its_end() -> None:
    loader = resumable(DataLoader(StatefulStream(4), 2), world_size=1, rank=0)
    list(loader)
    state = loader.state_dict()
    assert state["finished"]
    assert state["batches"] == 2
    resumed = resumable(DataLoader(StatefulStream(4), 2), world_size=2, rank=0)
    with pytest.warns(UserWarning, match="written by 1 processes.*resumed on 2"):
        resumed.load_state_dict(state)
    assert ids(resumed) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("used", [1, 9])
def test_streams_of_hugging_face_go_on_and_begin_again(tmp_path: Path, used: int) -> None:
    """They begin each iteration where a state was loaded: the epoch after it would be cut short, or empty."""
    datasets: Any = pytest.importorskip("datasets")
    for shard in range(4):
        lines = [json.dumps({"x": 5 * shard + i}) for i in range(5)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))

    def make() -> Any:
        stream = datasets.load_dataset("json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=True)
        stream = stream.filter(lambda row: row["x"] % 7)
        return resumable(DataLoader(stream, 2), world_size=1, rank=0)

    def rows(batches: Any) -> list[list[int]]:
        return [batch["x"].tolist() for batch in batches]

    whole = rows(make())
    assert len(whole) == 9
    loader = make()
    iterator = iter(loader)
    seen = rows(itertools.islice(iterator, used + 1))[:used]  # the training loop fetches one batch ahead
    if used == 9:
        assert next(iterator, None) is None
    resumed = make()
    resumed.load_state_dict(through_file(loader.state_dict()))
    assert seen[: used % 9] + rows(resumed) == whole
    assert rows(resumed) == whole
