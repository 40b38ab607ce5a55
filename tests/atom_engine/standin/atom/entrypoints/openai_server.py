"""Replaces ATOM's server: starts processes as ATOM does, each of which prints whether it knows the connector."""

from tests.atom_engine.process_tree import main

if __name__ == "__main__":
    main()
