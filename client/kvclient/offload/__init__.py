"""Decisions of every engine's connector, independent of engines and sockets."""
