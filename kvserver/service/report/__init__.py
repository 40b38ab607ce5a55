"""The status document and its warnings."""
