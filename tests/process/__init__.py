"""Tests with real processes: servers and workers, also when one of them dies or stops.

All build on harness.py (a server seen from outside), engine.py (a client whose every byte is known), worker.py (an
engine in its own process), raw.py (the protocol without kvclient) and checked.py (a brain that checks its invariants).

serving      what engines get when nothing goes wrong
http         pages and commands over HTTP
disk         servers with a disk tier
restart      what outlives a server
bad_input    clients and settings that are wrong
faults       processes that die, stop or hang;  python -m tests.process.faults
disk_faults  the same for the disk tier;        python -m tests.process.disk_faults
programs     replay, sizing, benchmarks, README

python -m tests.process.leaks and python -m tests.process.soak run for long."""
