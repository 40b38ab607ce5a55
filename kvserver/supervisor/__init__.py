"""The parent of all processes. It owns the arena and outlives a brain."""
