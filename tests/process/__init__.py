"""Tests with real processes: servers and workers, also when one of them dies or stops. See harness.py."""
