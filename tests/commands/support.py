"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import yaml

DEMO = "lightning.pytorch.demos.boring_classes"
BASE = {
    "seed_everything": 1,
    "model": f"{DEMO}.BoringModel",
    "data": f"{DEMO}.BoringDataModule",
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "limit_val_batches": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


def write_config(name: str, content: object) -> str:
    """Write a file into the current folder; its name."""
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return name
