"""Fixtures of more than one folder of unit tests."""

from tests.rigs.brain_lives import descriptor

__all__ = ["descriptor"]
