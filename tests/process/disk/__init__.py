"""Servers with a disk tier."""
