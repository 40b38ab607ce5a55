"""What engines get from a server when nothing goes wrong."""
