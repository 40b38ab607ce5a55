"""Benchmarks: one question each, answered next to the ceiling of the same run. `kvserver bench NAME` runs them."""
