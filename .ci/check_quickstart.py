"""Checks that the quickstart learned something, and that its checkpoint validates to the logged perplexity.

Usage: check_quickstart.py LOG_OF_FIT LOGGER_FOLDER_OF_FIT SAVE_DIR_OF_VALIDATE
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path


def perplexities(folder: Path) -> list[float]:
    """Validation perplexities below ``folder`` in the order in which they were logged."""
    files = sorted(folder.rglob("metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.open())]
    return [float(row["val_perplexity"]) for row in rows if row.get("val_perplexity")]


def main() -> None:
    """Fail with the figures if they are not the README's."""
    log, fit, validate = (Path(argument) for argument in sys.argv[1:])
    untrained = float(re.findall(r"step 0: validation perplexity ([\d.]+)", log.read_text())[0])
    trained = perplexities(fit)
    (reloaded,) = perplexities(validate)
    print(f"validation perplexity: {untrained} untrained, {trained} in training, {reloaded} from the checkpoint")
    if not min(trained) < untrained / 20:
        sys.exit(f"error: {min(trained)} is not far below the untrained model's {untrained}")
    if reloaded != min(trained):
        sys.exit(f"error: the checkpoint validates to {reloaded}, but training logged {min(trained)}")


if __name__ == "__main__":
    main()
