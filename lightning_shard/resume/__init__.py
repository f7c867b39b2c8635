"""Bitwise resume of data order and random numbers; nothing here imports Lightning."""
