"""Stands for ATOM where it is not installed: the names that kvclient.atom imports, and nothing of its engine."""
