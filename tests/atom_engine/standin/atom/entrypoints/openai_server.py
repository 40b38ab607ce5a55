"""In the place of ATOM's server: starts processes as ATOM does, each of which says whether it knows the connector."""

from tests.atom_engine.process_tree import main

if __name__ == "__main__":
    main()
