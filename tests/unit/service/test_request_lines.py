"""Log lines and counts of single requests: lines per level, why a prefix ends, `explain`, hits."""

import logging

from kvserver.service.base.effects import Log
from kvserver.service.base.events import Arrived
from kvserver.service.telling.log_sampling import LINES_PER_S, SAMPLE_S, Wanted
from kvserver.service.telling.lookup_counts import RESULTS_MAX
from kvserver.wire.explanation import Explanation, decode_explanations
from kvserver.wire.messages import (
    KEY_BYTES,
    Clear,
    Error,
    Explain,
    Explained,
    Found,
    GroupBlocks,
    Lookup,
    Status,
)
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, SLAB_BYTES, Client, Rig, chain, ids, key

KINDS = ("lookup", "store", "retrieve")


class TalkingRig(Rig):
    """A rig that keeps the lines about requests."""

    def __init__(self, wanted: Wanted = "all", **bounds: int) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []
        super().__init__(request_lines=wanted, **bounds)  # type: ignore[arg-type]
        handle = self.service.handle

        def heard(event, now_ns):  # type: ignore[no-untyped-def]
            effects = handle(event, now_ns)
            level = logging.DEBUG if wanted == "all" else logging.INFO
            said = [effect for effect in effects if isinstance(effect, Log) and effect.event in KINDS]
            assert all(line.level == level for line in said)
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
    assert looked == {
        "engine": "vllm",
        "request": found.id,
        "tokens": 5 * CHUNK_TOKENS,
        "dram_tokens": 3 * CHUNK_TOKENS,
        "disk_tokens": 0,
        "why": "absent",
        "key": key(chain(2, 2), 0).hex(),
    }
    assert (stored["tokens"], retrieved["lease_tokens"]) == (3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)
    for line in (stored, retrieved):
        assert (line["engine"], line["status"], line["bytes"]) == ("vllm", "done", 7)
        assert {"engine", "request", "status", "bytes", "ms"} <= set(line)


def test_lines_about_requests_are_bounded_in_each_second() -> None:
    rig = TalkingRig()
    client = Client(rig).register()
    for second in range(1, 4):
        for _ in range(LINES_PER_S + 13):
            client.lookup(chain(9, 1))
        assert len(rig.lines) == second * LINES_PER_S
        rig.wait_ms(1000)


def test_no_line_is_made_when_nobody_asked_for_them() -> None:
    rig = TalkingRig("none")
    client = Client(rig).register()
    client.store(chain(1, 2))
    client.lookup(chain(1, 2))
    assert rig.lines == []


def test_at_info_one_request_of_each_kind_has_a_line_now_and_then() -> None:
    rig = TalkingRig("sampled")
    client = Client(rig).register()
    for turn in range(1, 4):
        for seed in range(10 * turn, 10 * turn + 7):
            client.store(chain(seed, 2))
            client.lookup(chain(seed, 2))
        assert [event for event, _ in rig.lines] == ["store", "lookup"] * turn
        rig.wait_ms(1000 * SAMPLE_S)


# ---------------------------------------------------------------- why a prefix ends


def small_rig() -> TalkingRig:
    return TalkingRig(arena_bytes=4 * SLAB_BYTES)


def evict(client: Client) -> None:
    """Stores so much that all earlier chunks are evicted."""
    for seed in range(1000, 1026):
        client.rig.now_ns += 1_000_000
        client.store(chain(seed, 3))


def test_the_line_of_an_evicted_chunk_says_when_and_for_what() -> None:
    rig = small_rig()
    client, keys = Client(rig).register(), chain(1, 3)
    client.store(keys)
    evict(client)
    rig.now_ns += 7_000_000_000
    client.lookup(keys)
    _, line = rig.lines[-1]
    assert (line["why"], line["cause"], line["key"]) == ("gone", "store", key(keys, 0).hex())
    assert 7 < line["gone_s"] < 8  # type: ignore[operator]


def test_a_key_that_another_namespace_holds_is_said_so() -> None:
    rig = TalkingRig()
    one = Client(rig).register()
    Client(rig, engine="other").register(namespace=bytes(32))
    one.store(chain(1, 3))
    assert one.lookup(chain(1, 3), namespace=bytes(32)).chunks == 0
    _, line = rig.lines[-1]
    assert (line["why"], line["held_in"]) == ("absent", NAMESPACE.hex()[:12])


# ---------------------------------------------------------------- explain


def explained(client: Client, keys: bytes, namespace: bytes = b"") -> list[Explanation]:
    reply = client.ask(Explain(client.rig.number(), namespace, keys))
    assert isinstance(reply, Explained), reply
    return decode_explanations(reply.document)


def test_what_explain_says_is_what_a_lookup_finds() -> None:
    rig = small_rig()
    client = Client(rig).register()
    client.store(chain(1, 3))
    rig.movers_copy = False
    client.ask(client.storing(chain(2, 2), GroupBlocks(0, 0, ids(*range(6)))))
    for keys, why in (
        (chain(1, 3), "whole"),
        (chain(1, 3) + chain(9, 2), "absent"),
        (chain(2, 2), "writing"),
        (chain(3, 1), "absent"),
    ):
        (said,) = explained(client, keys)
        assert (said.namespace, said.chunk_tokens, said.why) == (NAMESPACE.hex(), CHUNK_TOKENS, why)
        assert said.chunks == client.lookup(keys).chunks
        assert said.chunks_asked == len(keys) // KEY_BYTES
        assert said.key == (key(keys, said.chunks).hex() if why != "whole" else "")


def test_explain_knows_a_chunk_from_the_middle_of_a_prompt_and_one_that_has_left() -> None:
    rig = small_rig()
    client = Client(rig).register()
    client.store(chain(1, 3))
    (middle,) = explained(client, key(chain(1, 3), 1))
    assert (middle.chunks, middle.why) == (1, "whole")
    evict(client)
    rig.now_ns += 2_000_000_000
    (middle,) = explained(client, key(chain(1, 3), 1))
    assert (middle.chunks, middle.why, middle.cause) == (0, "gone", "store")
    assert 2 < middle.gone_s < 3
    client.ask(Clear(rig.number(), NAMESPACE))
    (cleared,) = explained(client, chain(1025, 3))
    assert (cleared.why, cleared.cause) == ("gone", "cleared")


def test_a_key_that_left_two_namespaces_is_remembered_in_both() -> None:
    """Prompts have the same keys under each namespace, as for two models with one tokenizer."""
    rig = Rig()
    first, second = Client(rig).register(), Client(rig, engine="other").register(namespace=bytes(32))
    keys = chain(1, 3)
    first.store(keys)
    second.store(keys)
    first.ask(Clear(rig.number(), NAMESPACE))
    rig.now_ns += 3_000_000_000
    first.ask(Clear(rig.number(), bytes(32)))
    rig.now_ns += 5_000_000_000
    for namespace, gone_s in ((NAMESPACE, 8), (bytes(32), 5)):
        (said,) = explained(first, keys, namespace)
        assert (said.why, said.cause) == ("gone", "cleared")
        assert gone_s <= said.gone_s < gone_s + 1
    (stranger,) = explained(first, keys, bytes([7]) * 32)
    assert (stranger.why, stranger.cause) == ("namespace", "")


def test_explain_without_keys_tells_the_namespaces_and_an_unknown_one_is_said_so() -> None:
    rig = Rig()
    client = Client(rig).register()
    Client(rig, engine="other").register(namespace=bytes(32))
    assert {said.namespace: said.chunk_tokens for said in explained(client, b"")} == {
        NAMESPACE.hex(): CHUNK_TOKENS,
        bytes(32).hex(): CHUNK_TOKENS,
    }
    (said,) = explained(client, chain(1, 2), b"x" * 32)
    assert (said.chunks, said.chunk_tokens, said.why) == (0, 0, "namespace")


def test_explain_changes_nothing() -> None:
    rig = small_rig()
    client = Client(rig).register()
    client.store(chain(1, 3))
    counted, facts = rig.service.counters.totals(), rig.facts()
    rig.now_ns += 1_000_000
    explained(client, chain(1, 3))
    assert (rig.service.counters.totals(), rig.facts()) == (counted, facts)
    used = {node.used for space in rig.core.chunks.spaces.values() for node in space.nodes.values()}
    assert rig.now_ns not in used


# ---------------------------------------------------------------- the hit rate


def test_the_hit_rate_is_made_of_lookups_alone_and_a_miss_counts() -> None:
    rig = Rig()
    client = Client(rig).register()

    def counted() -> tuple[int, int, int, int, int]:
        counters = rig.service.counters
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


def test_lookups_that_nobody_counts_do_not_pile_up_and_are_all_counted() -> None:
    rig = Rig()
    client = Client(rig).register()
    waiting = []
    for _ in range(2 * RESULTS_MAX + 3):
        client.lookup(chain(5, 7))
        waiting.append(len(rig.core.lookup_counts._results))
    assert max(waiting) == RESULTS_MAX - 1
    assert waiting[-1] == 3
    rig.service.lookup_took(7000)
    assert not rig.core.lookup_counts._results
    seen = rig.core.counters
    assert seen.lookup_chunks["miss"] == 7 * (2 * RESULTS_MAX + 3)
    assert seen.lookup_ends["absent"] == seen.lookups == 2 * RESULTS_MAX + 3


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
