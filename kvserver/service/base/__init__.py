"""Events in, effects out, and deadlines: what all of the service speaks in."""
