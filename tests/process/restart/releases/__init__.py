"""Files that a server of an earlier release left, and the program that recorded them."""
