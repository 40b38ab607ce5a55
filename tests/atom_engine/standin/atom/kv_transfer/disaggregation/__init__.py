"""The package of ATOM's connectors."""
