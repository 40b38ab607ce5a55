"""kvserver: a KV-cache server for LLM inference engines. Importing this package imports and probes nothing."""

__version__ = "0.2.0"
