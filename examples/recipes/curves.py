"""Draws the losses of the recipes: ``python -m examples.recipes.curves runs examples/recipes/curves.png``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

PANELS = {
    "images": ("val_accuracy", "images named right"),
    "diffusion": ("val_loss", "error of the noise"),
    "teacher": ("val_neighbours", "neighbours of its shape"),
    "gan": ("val_near", "points near a centre"),
    "lora": ("val_loss", "nats per token"),
    "packed": ("val_loss", "nats per byte"),
}


def column(file: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric in Lightning's ``metrics.csv``."""
    rows = [row for row in csv.DictReader(file.open()) if row.get(name)]
    return [int(row["step"]) + 1 for row in rows], [float(row[name]) for row in rows]


def draw(runs: Path, picture: Path) -> None:
    """One panel for each recipe: the loss of training, and the validated metric."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    for panel, (name, (metric, text)) in zip(axes.flat, PANELS.items(), strict=True):
        file = max((runs / name).glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
        panel.plot(*column(file, "train_loss"), color="tab:gray", linewidth=1)
        panel.set_title(f"{name}: {text}", fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylabel("train_loss", color="dimgray")
        right = panel if metric == "val_loss" else panel.twinx()
        right.plot(*column(file, metric), color="tab:blue", marker="o")
        if right is panel:
            panel.set_ylabel(f"train_loss, {metric} (dots)")
        else:
            right.set_ylabel(f"{metric} (dots)", color="tab:blue")
            right.set_ylim(0, 1.05)
    figure.savefig(picture, dpi=80)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
