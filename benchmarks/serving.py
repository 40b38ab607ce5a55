"""Waiting for the arena, so that a benchmark measures neither its growth nor page faults."""

import time

from kvclient.client import Client

GROW_S_MAX = 300.0


def wait_for_arena(client: Client) -> None:
    """Until all of it has been touched."""
    deadline = time.monotonic() + GROW_S_MAX
    while time.monotonic() < deadline:
        arena = client.status()["arena"]
        if arena["ready_bytes"] == arena["total_bytes"]:
            return
        time.sleep(0.1)
    raise RuntimeError("the arena did not grow to its size")
