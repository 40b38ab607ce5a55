"""`python -m kvserver` is the `kvserver` command."""

from kvserver.cli.main import main

main()
