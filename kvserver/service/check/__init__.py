"""The invariants."""
