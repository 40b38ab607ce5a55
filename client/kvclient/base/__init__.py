"""The base of the client: its background thread."""
