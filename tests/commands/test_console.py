"""The console of the README's first command and of a resumed run, against the texts in ``console/``.

``python -m tests.commands.test_console`` rewrites the texts. Read them before you commit them: a warning of another
library, a line of each rank or a message behind a progress bar does not belong there.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT

TEXTS = Path(__file__).parent / "console"
FIT = "lightning-shard fit --config configs/quickstart.yaml"
LAST = "--ckpt_path runs/quickstart/version_0/checkpoints/last.ckpt"
# DeepSpeed and the checkpoint of another engine in the second run: both bring messages of their own.
COMMANDS: Mapping[str, str] = {
    "fit": FIT,
    "resume": f"{FIT} --trainer.max_steps 6 --trainer.strategy shard_deepspeed_stage_2_aligned {LAST}",
}
TINY = {
    "trainer": {
        "max_steps": 4,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    },
    "model": {"init_args": {"layers": 1, "heads": 2, "width": 16, "max_length": 32}},
    "data": {"init_args": {"seq_len": 32, "limit_bytes": 20000}},
}
BAR = r"(Sanity Checking|Training|Validation|Epoch \d+)( DataLoader \d+)?: .*\| \d+/[\d?]+ \[[^]]*\]"
# A rank is slow on a busy machine, and the rest are numbers, the machine's facts and the folder.
VARYING = [
    (r"^(Slowest|slowest in \d+ of \d+ windows): .*$", ""),
    (r"; slowest: rank .*$", ""),
    (r"(GPU|TPU) available: .*", r"\1 available: #"),
    (r"epoch=\d+-step=\d+", "epoch=#-step=#"),
    (r"\b\d[\d,]*\.\d+\b|\b\d[\d,]*(?= ?(tokens/s|ms|s|[KMG]iB|%)\b)", "#"),
    (r"(?<=grad_norm )\d+|(?<=  )\d[\d,]*", "#"),
    (r"\S+/site-packages/(\S+):\d+:", r"\1:#:"),
    (r" {3,}", "  "),
]


def console(text: str) -> list[str]:
    """The lines that stay on a terminal, without what varies; those of other ranks, in any order, are last."""
    lines = []
    for line in re.sub(r"\x1b\[[\d;]*[A-Za-z]", "\r", text).replace("\r", "\n").splitlines():
        kept = "" if re.fullmatch(BAR, line.strip()) else line.rstrip()
        for pattern, put in VARYING:
            kept = re.sub(pattern, put, kept)
        lines += [kept] if kept else []
    return sorted(lines, key=lambda line: line.startswith("[rank"))


def _set(settings: dict[str, object], changes: Mapping[str, object]) -> None:
    for key, value in changes.items():
        inside = settings.get(key)
        if isinstance(inside, dict) and isinstance(value, dict):
            _set(inside, value)
        else:
            settings[key] = value


def run_all(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and console of each command, run one after the other in ``folder``."""
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    _set(settings, TINY)
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.yaml").write_text(yaml.safe_dump(settings))
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, command in COMMANDS.items():
        words = [str(Path(sys.executable).with_name("lightning-shard")), *shlex.split(command)[1:]]
        environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONWARNINGS", "COLUMNS")}
        ended = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, env={**environ, "PYTHONPATH": str(ROOT)}
        )
        shown = [f"$ {command}", *console(ended.stdout), "", "stderr:", *console(ended.stderr)]
        yield name, "\n".join(shown) + "\n"


@pytest.mark.matrix
def test_the_console_is_the_kept_one(tmp_path: Path) -> None:
    for name, found in run_all(tmp_path):
        kept = (TEXTS / f"{name}.txt").read_text()
        difference = "\n".join(difflib.unified_diff(kept.splitlines(), found.splitlines(), "kept", "found", "", "", 1))
        assert found == kept, difference


def test_the_readme_shows_the_last_lines() -> None:
    [shown] = re.findall(r"^```text\n(checkpoint: .*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    kept = (TEXTS / "fit.txt").read_text().partition("\n\nstderr:")[0].splitlines()
    assert console(shown) == kept[-4:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, text in run_all(Path(place)):
            (TEXTS / f"{name}.txt").write_text(text)
