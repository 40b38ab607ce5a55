"""The tables of the brain, a file each."""
