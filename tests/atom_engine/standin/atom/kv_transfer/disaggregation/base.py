"""What connectors derive from."""


class KVConnectorBase:
    """A worker's half."""


class KVConnectorSchedulerBase:
    """The scheduler's half."""
