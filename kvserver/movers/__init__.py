"""Processes that move bytes: one for each GPU, one for the disks."""
