"""The disk tier under kills, stops and failing I/O. `python -m tests.process.disk_faults` runs many rounds."""
