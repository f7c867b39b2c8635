"""Checkpoints and weights of other forms than our own directory, read and written tensor by tensor."""
