"""`python -m kvserver` is the `kvserver` command."""

from kvserver.cli import main

main()
