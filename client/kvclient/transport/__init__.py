"""The client's conversation with the server: sockets, sessions and jobs."""
