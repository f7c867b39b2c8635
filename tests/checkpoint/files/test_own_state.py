"""What each rank alone goes on with, behind the boxes in its data file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.files.layout import RUN_STATE, Directory, open_directory
from lightning_shard.checkpoint.files.manifest import Facts
from lightning_shard.checkpoint.files.tensor_files import read_own_state, write_boxes
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.foreign.lightning_file import write_full
from lightning_shard.checkpoint.load import open_checkpoint, open_portable, with_own_states
from lightning_shard.checkpoint.save import training_state
from lightning_shard.errors import CheckpointCorruptError
from lightning_shard.ranks import Ranks
from tests.checkpoint.calls import save
from tests.harness import run_distributed

STATE = {"rng": torch.arange(5), "metrics": {"seen": 3}}


def test_a_rank_without_boxes_has_a_file_for_it(tmp_path: Path) -> None:
    written = write_boxes(tmp_path, 3, [], lambda index: torch.empty(0), encode_trainer_state(STATE))
    assert list(written.files) == ["__3_0.distcp"]
    assert torch.equal(read_own_state(open_directory(tmp_path), 3)["rng"], STATE["rng"])
    assert not write_boxes(tmp_path, 4, [], lambda index: torch.empty(0)).files


def _huge(data: bytes) -> bytes:
    return data[:-8] + (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "does not end with the state of rank 0"),
        (lambda data: data[:-8], "does not end with the state of rank 0"),
        (lambda data: data[:-8] + bytes(8), "does not end with the state of rank 0"),
        (_huge, "does not end with the state of rank 0"),
        (lambda data: b"\0" * (len(data) - 8) + data[-8:], "can't be read"),
        (lambda data: (state := encode_trainer_state({})[:-1]) + len(state).to_bytes(8, "little"), "can't be read"),
    ],
    ids=["empty", "cut", "of no bytes", "of 2**62 bytes", "zeros", "half an archive"],
)
def test_damage_is_said_in_a_line(tmp_path: Path, change: Callable[[bytes], bytes], said: str) -> None:
    write_boxes(tmp_path, 0, [], lambda index: torch.empty(0), encode_trainer_state(STATE))
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointCorruptError, match=said):
        read_own_state(open_directory(tmp_path), 0)


def _save(path: Path, states: list[dict[str, Any]]) -> None:
    module = nn.Linear(2, 2)
    trainer_state = {RUN_STATE: {"seed": 1}, "global_step": 2}

    def contents() -> Any:
        own, facts = states[Ranks.of().rank], Facts(engine="ddp", policy="fp32")
        return training_state(module=module, optimizers=[], trainer_state=trainer_state, own_state=own, facts=facts)

    save(path, contents)


def _read(path: Path) -> tuple[list[Any], list[str]]:
    """What a rank has of each, and the data files that it opened for that."""
    opened, found, own = list[str](), open_checkpoint(path), Directory.open

    def noted(self: Directory, name: str) -> Any:
        opened.append(name)
        return own(self, name)

    Directory.open = noted  # type: ignore[method-assign]
    try:
        return [state["number"] for state in with_own_states(found)[RUN_STATE]["ranks"]], sorted({*opened})
    finally:
        Directory.open = own  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("saved", "ranks", "expected"),
    [
        (2, 2, [([0, 0], [0]), ([1, 1], [1])]),
        (3, 2, [([0, 0, 2], [0, 2]), ([1, 1, 1], [1])]),
        (2, 3, [([0, 0], [0]), ([1, 1], [1]), ([0, 0], [0])]),
    ],
)
def test_each_rank_reads_its_own_where_they_differ_in_numbers_alone(
    tmp_path: Path, saved: int, ranks: int, expected: list[tuple[list[int], list[int]]]
) -> None:
    states = [{"number": n, "list": [torch.ones(2)] * n, "of": torch.full((3,), n)} for n in range(saved)]
    run_distributed(_save, saved, tmp_path / "a.ckpt", states)
    found = run_distributed(_read, ranks, tmp_path / "a.ckpt")
    assert found == [(numbers, [f"__{file}_0.distcp" for file in files]) for numbers, files in expected]


@pytest.mark.parametrize(
    "differing",
    [{"key": 1}, {"of": torch.ones(4)}, {"of": torch.ones(3, dtype=torch.float64)}, {"fx": "other"}, {"flag": True}],
    ids=["keys", "shape", "dtype", "text", "flag"],
)
def test_all_ranks_read_all_where_they_differ_otherwise(tmp_path: Path, differing: dict[str, Any]) -> None:
    states = [{"number": n, "of": torch.ones(3), "fx": "mean", "flag": False} for n in range(2)]
    states[1] |= differing
    run_distributed(_save, 2, tmp_path / "a.ckpt", states)
    found = run_distributed(_read, 2, tmp_path / "a.ckpt")
    assert found == [([0, 1], ["__0_0.distcp", "__1_0.distcp"])] * 2


def test_another_form_has_all(tmp_path: Path) -> None:
    run_distributed(_save, 2, tmp_path / "a.ckpt", [{"number": n} for n in range(2)])
    write_full(tmp_path / "a.full.ckpt", open_portable(tmp_path / "a.ckpt"))
    stock = torch.load(tmp_path / "a.full.ckpt", weights_only=True)
    assert stock[RUN_STATE] == {"seed": 1, "ranks": [{"number": 0}, {"number": 1}]}
