"""The owner of each place in DRAM and on disk, and eviction when there is no room."""
