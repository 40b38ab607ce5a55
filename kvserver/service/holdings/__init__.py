"""Who owns which place in DRAM and on disk, and who goes when there is no room."""
