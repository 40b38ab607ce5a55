"""Invariants of the service, checked by the simulator and by tests."""
