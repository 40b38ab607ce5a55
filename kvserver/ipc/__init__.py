"""What the server's own processes say to each other, and how."""
