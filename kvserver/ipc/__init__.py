"""Communication between the server's own processes."""
