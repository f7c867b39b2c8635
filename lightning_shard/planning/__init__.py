"""Predict the bytes per rank, network traffic and time of a run before it starts. Nothing here imports Lightning."""
