"""Registers "kvserver" with ATOM's connector factory, from outside of ATOM. Imports nothing heavy.

ATOM spawns its processes and reads no entry points, so each process must register. Either its main module imports this
one (atom_serve.py), or a hook waits for ATOM's factory (atom_hook.py).
"""

from typing import Any

NAME = "kvserver"
MODULE = "kvclient.atom"


def register(factory: Any) -> None:
    """Register the connector. factory: ATOM's KVConnectorFactory. Idempotent."""
    factory.register(
        NAME,
        worker_module=MODULE,
        worker_class="KvServerConnector",
        scheduler_module=MODULE,
        scheduler_class="KvServerScheduler",
        # True would make ATOM use HBM to stage transfers to another node, for DeepSeek-V4.
        requires_pd_staging=False,
    )
