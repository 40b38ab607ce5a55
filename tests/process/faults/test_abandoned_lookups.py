"""A lookup that its caller gave up because the brain was stopped: no client knows of the lease that it grants."""

from concurrent.futures import Future

import pytest

from kvclient.values import Found
from tests.process.engine import Engine, prompt
from tests.process.faults.scene import TIMEOUTS
from tests.process.harness import WAIT_S, Server, stopped, until

GIVE_UP_S = 0.1
LEASE_TTL_MS = int(3 * WAIT_S * 1000)
"""Longer than WAIT_S, so that no wait of a test sees a lease expire."""


@pytest.mark.parametrize("way", ["lookup", "lookup_async"])
def test_a_lookup_that_was_given_up_keeps_no_chunks(way: str) -> None:
    story = prompt(1, chunks=3)
    with Server(lease_ttl_ms=LEASE_TTL_MS) as server, Engine(server.path, timeouts=TIMEOUTS) as engine:
        engine.ready().store(story)
        granted = server.status().counters["leases_granted"]
        with stopped(server.brain_pid()):
            answer = getattr(engine.client, way)(engine.namespace, story.keys, timeout_s=GIVE_UP_S)
            found: Found = answer.result(WAIT_S) if isinstance(answer, Future) else answer
            assert (found.chunks, found.lease, found.why) == (0, None, "timeout")
        until("the lease to be granted", lambda: server.status().counters["leases_granted"] == granted + 1)
        until("the lease to end", lambda: server.status().leases == 0)
        assert engine.client.wait_connected(WAIT_S)
        assert engine.retrieve(story) == 3
