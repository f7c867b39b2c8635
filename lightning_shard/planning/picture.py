"""A picture of a plan: the bytes of a device at the peak, by kind, of one engine or of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_shard.errors import ConfigurationError
from lightning_shard.memory import KINDS
from lightning_shard.planning.report import Row


def require() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ConfigurationError: with how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "--picture needs matplotlib, which is not installed: pip install 'lightning-shard[examples]'. Without "
            "--picture the plan is printed."
        ) from error


def draw(rows: Sequence[Row], memory: int, path: Path) -> None:
    """Write bars of bytes by kind, one for each row, and a line where the memory ends.

    Args:
        rows: engines that run.
        memory: bytes of a device that the run may use.
        path: a file that matplotlib can write: .png, .svg, .pdf.

    Raises:
        ConfigurationError: there is no matplotlib, or it writes no such file.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which keeps state and may look for a screen.
    figure = Figure(figsize=(10, 1.5 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [row.title for row in rows]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for kind in KINDS:
        sizes = [getattr(row.most.device, kind) / 1e9 for row in rows]
        if any(sizes):
            axes.barh(places, sizes, left=left, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(memory / 1e9, color="black", linestyle="--", label="a device's memory")
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel("GB on a device at the peak of a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--picture {path} can't be written: {error}.") from error
