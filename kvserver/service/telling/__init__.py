"""What is counted and remembered for people. Nothing is decided by it."""
