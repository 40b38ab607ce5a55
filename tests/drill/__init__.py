"""Deliberate bugs, one at a time: does a simulator or a test notice each? `python -m tests.drill` tries all.

Each bug attacks one promise of README.md:

P1  no bytes but those stored under that key        P5  chunks never exceed a tier's cap
P2  every failure is a miss within its deadline     P6  /healthz and /metrics never wait for a device
P3  a dead engine's mappings are freed within 5 s   P7  every request gets one reply
P4  kill -9 loses nothing that was sealed           P8  a prompt hits from any process, after any restart

A bug is a pattern, so most of the code around it may be reworded. One whose pattern is no longer found exactly once
is stale. It is reported, and the others are tried: write it anew when you meet it."""
