"""The package of ATOM's entry points."""
