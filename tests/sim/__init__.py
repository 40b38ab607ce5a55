"""A seeded simulator of everything around the service: clients, movers, supervisor, ledger, time. See README.md."""
