"""The disk tier as the brain decides it."""
