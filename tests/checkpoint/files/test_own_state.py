"""The state of each rank alone, after the boxes in its data file."""

from __future__ import annotations

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


def test_a_rank_without_boxes_has_a_file_for_it_and_damage_is_told(tmp_path: Path) -> None:
    data = encode_trainer_state({"seen": 3})
    written = write_boxes(tmp_path, 0, [], lambda index: torch.empty(0), data)
    assert list(written.files) == ["__0_0.distcp"]
    assert read_own_state(open_directory(tmp_path), 0) == {"seen": 3}
    assert not write_boxes(tmp_path, 4, [], lambda index: torch.empty(0)).files
    for changed, said in {
        b"": "does not end with the state of rank 0",
        data + bytes(8): "does not end with the state of rank 0",
        data + (1 << 62).to_bytes(8, "little"): "does not end with the state of rank 0",
        data[:-1] + (len(data) - 1).to_bytes(8, "little"): "can't be read",
    }.items():
        (tmp_path / "__0_0.distcp").write_bytes(changed)
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
    """Return each rank's number as this rank has it, and the data files that it opened."""
    opened, found, own = list[str](), open_checkpoint(path), Directory.open

    def noted(self: Directory, name: str) -> Any:
        opened.append(name)
        return own(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Directory, "open", noted)
        states = with_own_states(found)[RUN_STATE]["ranks"]
    return [state["number"] for state in states], sorted({*opened})


def test_the_first_rank_reads_the_states_of_all(tmp_path: Path) -> None:
    """Another form has them all too."""
    states = [{"number": n, "list": [torch.ones(2)] * n, f"key {n}": torch.full((3,), n)} for n in range(3)]
    run_distributed(_save, 3, tmp_path / "a.ckpt", states)
    found = run_distributed(_read, 2, tmp_path / "a.ckpt")
    assert found == [([0, 1, 2], [f"__{rank}_0.distcp" for rank in range(3)]), ([0, 1, 2], [])]
    write_full(tmp_path / "a.full.ckpt", open_portable(tmp_path / "a.ckpt"))
    whole = torch.load(tmp_path / "a.full.ckpt", weights_only=True)[RUN_STATE]
    assert [state["number"] for state in whole["ranks"]] == [0, 1, 2]
