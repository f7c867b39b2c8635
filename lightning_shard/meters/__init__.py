"""Measurements of a run: floating point operations, peaks, bytes and times. Nothing here imports Lightning."""
