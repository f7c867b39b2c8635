"""Fixtures of the folders whose commands are tested here."""

from tests.checkpoint.conftest import trained

__all__ = ["trained"]
