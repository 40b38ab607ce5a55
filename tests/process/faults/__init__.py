"""Processes that die, stop or hang while others go on. `python -m tests.process.faults` runs many rounds."""
