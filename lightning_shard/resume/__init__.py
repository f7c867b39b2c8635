"""Bitwise resume of data order and random numbers; nothing here imports Lightning.

- `wrap.resumable` makes a stock DataLoader carry its position, at another world size too.
- `lengths` ends all ranks together where their data is uneven.
- `rng` has the random numbers of a rank as values, `metrics` the states of torchmetrics.
"""
