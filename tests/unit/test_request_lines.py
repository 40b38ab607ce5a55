"""What is said and counted of single requests: one line each, at most so many a second, and a hit rate of lookups."""

import logging

from kvserver.service.effects import Log
from kvserver.service.events import Arrived
from kvserver.service.state import REQUEST_LINES_PER_S
from kvserver.wire.messages import KEY_BYTES, Clear, Error, Found, GroupBlocks, Lookup, Status
from tests.unit.brain_rig import CHUNK_TOKENS, NAMESPACE, Client, Rig, chain, ids


class TalkingRig(Rig):
    """A rig that keeps what is logged at debug level."""

    def __init__(self, *, log_requests: bool = True) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []
        super().__init__(log_requests=log_requests)
        handle = self.service.handle

        def heard(event, now_ns):  # type: ignore[no-untyped-def]
            effects = handle(event, now_ns)
            said = [effect for effect in effects if isinstance(effect, Log) and effect.level == logging.DEBUG]
            self.lines += [(line.event, dict(line.fields)) for line in said]
            return effects

        self.service.handle = heard  # type: ignore[method-assign]


# ---------------------------------------------------------------- lines


def test_a_request_is_one_line_with_the_tokens_that_were_asked_for_and_hit() -> None:
    rig = TalkingRig()
    client = Client(rig, engine="vllm").register()
    keys = chain(1, 3)
    assert rig.lines == []
    client.store(keys)
    found = client.lookup(keys + chain(2, 2))
    client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(9)))))
    (store, stored), (lookup, looked), (retrieve, retrieved) = rig.lines
    assert (store, lookup, retrieve) == ("store", "lookup", "retrieve")
    assert looked == {"engine": "vllm", "request": found.id, "tokens": 5 * CHUNK_TOKENS, "hit_tokens": 3 * CHUNK_TOKENS}
    for line in (stored, retrieved):
        assert (line["engine"], line["status"], line["bytes"]) == ("vllm", "done", 7)
        assert {"engine", "request", "status", "bytes", "ms"} <= set(line)


def test_lines_about_requests_are_bounded_in_each_second() -> None:
    rig = TalkingRig()
    client = Client(rig).register()
    for second in range(1, 4):
        for _ in range(REQUEST_LINES_PER_S + 13):
            client.lookup(chain(9, 1))
        assert len(rig.lines) == second * REQUEST_LINES_PER_S
        rig.wait_ms(1000)


def test_no_line_is_made_when_nobody_asked_for_them() -> None:
    rig = TalkingRig(log_requests=False)
    client = Client(rig).register()
    client.store(chain(1, 2))
    client.lookup(chain(1, 2))
    assert rig.lines == []


# ---------------------------------------------------------------- the hit rate


def test_the_hit_rate_is_made_of_lookups_alone_and_a_miss_counts() -> None:
    rig = Rig()
    client = Client(rig).register()
    counters = rig.service.counters

    def counted() -> tuple[int, int, int, int, int]:
        chunks = counters.lookup_chunks
        hit = chunks["dram"] + chunks["disk"]
        return counters.lookups, counters.lookups_hit, sum(chunks.values()), hit, counters.lookup_tokens["dram"]

    client.store(chain(1, 3))
    client.ask(Status(rig.number()))
    client.ask(Clear(rig.number(), bytes(32)))
    client.ask(client.retrieving(4711, GroupBlocks(0, 0, ids(1))))
    assert counted() == (0, 0, 0, 0, 0), "none of these asks what is held"
    for keys in (b"", chain(1, 1)[:-1], bytes(KEY_BYTES * 5000)):
        assert isinstance(client.ask(Lookup(rig.number(), NAMESPACE, keys, 1)), Error)
    stranger = Lookup(rig.number(), NAMESPACE, chain(1, 3), 1)
    rig.handle(Arrived(rig.number(), stranger, -1))
    assert counted() == (0, 0, 0, 0, 0), "a refusal says nothing of what is held"
    client.lookup(chain(5, 7))
    assert counted() == (1, 0, 7, 0, 0), "a lookup that finds nothing is one"
    client.lookup(chain(5, 2), namespace=bytes(32))
    assert counted() == (2, 0, 9, 0, 0)
    found = client.lookup(chain(1, 3) + chain(6, 1))
    assert found.chunks == 3
    assert counted() == (3, 1, 13, 3, 3 * CHUNK_TOKENS)


def test_a_hit_that_is_too_short_for_a_lease_is_no_hit() -> None:
    rig = Rig()
    client = Client(rig).register()
    client.store(chain(1, 3))
    reply = client.ask(Lookup(rig.number(), NAMESPACE, chain(1, 3), 4))
    assert isinstance(reply, Found)
    assert (reply.chunks, reply.lease) == (3, 0)
    seen = rig.service.counters
    assert (seen.lookups, seen.lookups_hit, seen.lookup_chunks["unwanted"]) == (1, 0, 3)
    assert sum(seen.lookup_chunks.values()) == 3
