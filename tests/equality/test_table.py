"""A sample of the table of what is equal, and in the matrix all of it, beside what the guide shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.equality import table
from tests.groups import sampled

PAGE = Path(__file__).parents[2] / "examples" / "guides" / "equality.md"
SAMPLE = [
    ("shard_deepspeed_stage_1_aligned", "CLIP", "AdamW"),
    ("shard_fsdp_aligned", "a block used twice", "AdamW"),
    ("shard_deepspeed_stage_2", "LoRA on frozen bf16", "AdamW"),
]


@pytest.mark.parametrize(("name", "module", "optimizer"), sampled(SAMPLE, 2))
def test_a_sample_is_equal(name: str, module: str, optimizer: str) -> None:
    assert table.cell(2, name, module, optimizer) == table.EQUAL


def shown(name: str, ranks: int) -> dict[str, str]:
    """Column to cell of a name's rows in the guide."""
    part = PAGE.read_text().partition(f"<!-- {ranks} processes -->")[2].partition("<!-- end")[0]
    rows = [re.findall(rf"^\| {row}\|(.*)\|$", part, re.M) for row in ("", f"(?:[^|]*, )?`{name}`[^|]*")]
    heads, cells = ([cell.strip() for row in found for cell in row.split("|")] for found in rows)
    return {column: cell.partition(" ")[0] for column, cell in zip(heads, cells, strict=True)}


@pytest.mark.matrix
@pytest.mark.parametrize("name", table.rows())
def test_the_guide_shows_what_is_measured(name: str) -> None:
    # Columns of packages that are not installed are not measured.
    found = {table.head(title): table.cell(2, name, *title) for title in table.columns()}
    said = shown(name, 2)
    assert {column: "no" if len(cell) > 1 else cell for column, cell in found.items()} == {c: said[c] for c in found}
