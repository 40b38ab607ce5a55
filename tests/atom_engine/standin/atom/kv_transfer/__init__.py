"""The package of ATOM's KV transfer."""
