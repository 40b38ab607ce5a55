"""Servers that share a remote store: real processes, real stores."""
