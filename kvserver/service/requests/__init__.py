"""What engines ask for: sessions, caches, lookups, stores, retrieves."""
