"""Decisions about the disk tier: reads, writes, draining, segments and recovery."""
