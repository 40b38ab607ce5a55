"""Requests of engines: sessions, caches, lookups, stores, retrieves."""
