"""Bitwise resume of data order, random numbers and metrics."""
