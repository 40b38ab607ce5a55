"""What we hold: the tree of chunks of each namespace, what of it is servable, and what goes first."""
