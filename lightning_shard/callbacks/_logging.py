"""A window's values in the loggers and the progress bar."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_shard.meters.throughput import Window


def log_window(module: LightningModule, window: Window, *, on_cpu: bool) -> None:
    """Log a window's values; on all ranks, which have the same."""
    tokens = window.tokens_per_second
    if tokens is not None:
        module.log("tokens/s", round(tokens), prog_bar=True)
        module.log("tokens/s/device", round(tokens / window.devices))
    if window.padding_share is not None:
        module.log("padding_share", window.padding_share)
    module.log("samples/s", window.samples_per_second, prog_bar=tokens is None)
    module.log("samples/s/device", window.samples_per_second_per_device)
    module.log("step_seconds", window.step_seconds)
    module.log("data_share", window.data_share)
    module.log("checkpoint_seconds", window.checkpoint_seconds)
    if window.mfu is not None:
        module.log("mfu", window.mfu, prog_bar=True)
    module.log("memory/rank", float(window.largest_rank))
    if on_cpu:
        module.log("memory/resident_gib", window.allocated / 2**30)
    else:
        module.log("memory/allocated_gib", window.allocated / 2**30)
        module.log("memory/reserved_gib", window.reserved / 2**30)
