"""Portable checkpoints: one on-disk form for every engine, mesh and number of ranks. Nothing here imports Lightning."""
