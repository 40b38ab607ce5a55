"""The brain's process: sockets and loop around the service, which decides."""
