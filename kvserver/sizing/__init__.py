"""What an arena of each size would hit: recorded traffic through the service itself, without servers or bytes."""
