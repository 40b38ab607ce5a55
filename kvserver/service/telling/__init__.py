"""Counters and statistics for people. No decision depends on them."""
