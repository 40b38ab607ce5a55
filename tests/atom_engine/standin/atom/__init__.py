"""Replaces ATOM where it is not installed: only the names that kvclient.atom imports, nothing of its engine."""
