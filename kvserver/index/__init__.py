"""The tree of chunks of each namespace, which of them are servable, and which go first."""
