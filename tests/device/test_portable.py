"""The portable path, which moves bytes with torch alone; the kernels of both vendors are checked against it."""
