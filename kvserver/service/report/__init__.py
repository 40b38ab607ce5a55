"""The status document, and what is wrong in it."""
