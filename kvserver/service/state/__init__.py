"""The tables of the service, one file each."""
