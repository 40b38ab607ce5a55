"""Tests with real processes: servers, workers, and what happens when one of them dies or stops. See harness.py."""
