"""Places of chunks: slots in the DRAM arena, extents on disk, and their records."""
