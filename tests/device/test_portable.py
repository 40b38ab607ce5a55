"""The portable path, which moves bytes by torch alone, and what it is a reference of: the kernels of either vendor."""
