"""Pages and commands over HTTP."""
