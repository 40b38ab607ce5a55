"""As in ATOM."""
