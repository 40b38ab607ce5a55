"""The identity of an engine's model: every byte of its files, hashed in the background."""
