"""The hit rate of each arena size: recorded traffic through the service itself, without servers or bytes."""
