"""Makes "kvserver" known to ATOM's connector factory, from outside of ATOM. Names only: nothing heavy is imported.

ATOM starts its processes by spawn and reads no entry points, so each of them has to come by here: either because this
is imported by their main module (atom_serve.py), or because a hook waits for ATOM's factory (atom_hook.py).
"""

from typing import Any

NAME = "kvserver"
MODULE = "kvclient.atom"


def register(factory: Any) -> None:
    """factory: ATOM's KVConnectorFactory. May be said twice."""
    factory.register(
        NAME,
        worker_module=MODULE,
        worker_class="KvServerConnector",
        scheduler_module=MODULE,
        scheduler_class="KvServerScheduler",
        # Otherwise DeepSeek-V4 takes HBM to stage what goes to another node.
        requires_pd_staging=False,
    )
