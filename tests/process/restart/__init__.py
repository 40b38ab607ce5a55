"""What outlives a server, and how servers stop and start."""
