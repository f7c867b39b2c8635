"""A sample of the table of what is equal, and in the matrix all of it, beside what the guide shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.equality import table

PAGE = Path(__file__).parents[2] / "examples" / "guides" / "equality.md"
SAMPLE = [
    ("shard_deepspeed_stage_1_aligned", "CLIP", "AdamW"),
    ("shard_fsdp_aligned", "a block used twice", "AdamW"),
    ("shard_deepspeed_stage_2", "LoRA on frozen bf16", "AdamW"),
]


@pytest.mark.parametrize(("name", "module", "optimizer"), SAMPLE)
def test_a_sample_is_equal(name: str, module: str, optimizer: str) -> None:
    assert table.cell(2, name, module, optimizer) == table.EQUAL


def shown(name: str, ranks: int) -> list[str]:
    """The cells of a name's rows in the guide: those of modules, then those of optimizers."""
    part = PAGE.read_text().partition(f"<!-- {ranks} processes -->")[2].partition("<!-- end")[0]
    return [cell.strip() for row in re.findall(rf"^\| `{name}` \|(.*)\|$", part, re.M) for cell in row.split("|")]


@pytest.mark.matrix
@pytest.mark.parametrize("name", table.rows())
def test_the_guide_shows_what_is_measured(name: str) -> None:
    titles = [title for kind in (True, False) for title in table.columns() if (title[1] == "AdamW") == kind]
    found = [table.cell(2, name, *title) for title in titles]
    assert ["no" if len(cell) > 1 else cell for cell in found] == [cell.partition(" ")[0] for cell in shown(name, 2)]
