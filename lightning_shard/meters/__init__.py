"""What a run achieves: floating point operations, peaks, bytes and times. Nothing here imports Lightning."""
