"""The configuration: keys, defaults, files, and what a start refuses."""
