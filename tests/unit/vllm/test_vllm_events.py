"""vLLM's events about the server's chunks: the bytes that routers get, and what the scheduler's steps have to do."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.announced import Announced
from kvclient.offload.values import Group
from kvclient.vllm import events as connector_events
from kvclient.vllm.events import Kind, RouterEvents, Words, kinds_of
from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, NamespaceCleared
from kvserver.wire.messages import KEY_BYTES
from tests.rigs.dynamo_indexer import PYTHON, Indexer
from tests.rigs.router_decoders import Seen, Undecoded, dynamo, llm_d
from tests.rigs.router_index import Index
from tests.rigs.vllm_events import RELEASES, Utils, block_hashes, encoded, events_of
from tests.rigs.vllm_rig import BLOCK, CHUNK, NAMESPACE, Bench, Pool, stored
from tests.rigs.vllm_rig import request as plain_request

FULL, WINDOW = Group(BLOCK), Group(BLOCK, "window", 7)
FULL_KIND, WINDOW_KIND = Kind("full_attention", None), Kind("sliding_window", 8)
TOKENS = 41
KEYS = [bytes([9, place]) * 16 for place in range(TOKENS // CHUNK)]
DECODERS: dict[str, Callable[[bytes], list[Seen]]] = {
    "llm-d": llm_d,
    "dynamo": lambda payload: dynamo(payload, block_size=BLOCK),
}
CPU = {"llm-d": "cpu", "dynamo": "host-pinned"}
DISK = {"llm-d": "storage", "dynamo": "disk"}


class Stream:
    """The server's events, by hand."""

    def __init__(self) -> None:
        self.news: list[KvEvent] = []
        self.is_followed = True
        self.closed = False

    def take(self, *, until_s: float) -> list[KvEvent]:
        news, self.news = self.news, []
        return news

    def close(self) -> None:
        self.closed = True


class Teller:
    """One engine's events, in the words of one release."""

    def __init__(
        self,
        release: str = "0.33",
        *,
        groups: Sequence[Group] = (FULL,),
        kinds: Sequence[Kind] = (FULL_KIND,),
        ints: bool = True,
        utils: Any = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.module = events_of(release)
        stream: Any = Stream()
        self.stream: Stream = stream
        self.clock_s = 0.0
        words = Words(self.module, utils or Utils(ints=ints), groups, kinds)
        self.events = RouterEvents(
            stream, words, Announced(chunks_max=100), chunk_tokens=CHUNK, now=now or (lambda: self.clock_s)
        )
        self.pool = Pool()
        self.events.use_pool(self.pool)
        self.events.use_namespace(NAMESPACE)

    def sees(self, asked: Any, keys: Sequence[bytes] = KEYS) -> None:
        self.events.saw(asked, first_chunk=0, parent=b"", keys=b"".join(keys))

    def payload(self, *news: KvEvent) -> bytes:
        """What vLLM publishes until all is told."""
        self.stream.news += news
        told = self.events.take()
        while self.events.pending:
            told += self.events.take()
        return encoded(self.module, told, rank=3)


def request(**more: object) -> Any:
    asked = plain_request(tokens=TOKENS, first=50, **more)
    asked.block_hashes = block_hashes(asked.all_token_ids, BLOCK)
    return asked


def in_dram(*keys: bytes) -> ChunksStored:
    return ChunksStored(NAMESPACE, "dram", b"", list(keys), CHUNK)


def numbers(asked: Any) -> list[int]:
    """The block hashes as routers have them."""
    return [int.from_bytes(block[-8:], "big") for block in asked.block_hashes]


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("router", DECODERS)
def test_a_router_reads_blocks_tokens_and_tier_in_each_release(release: str, router: str) -> None:
    teller, asked = Teller(release), request()
    teller.sees(asked)
    blocks, ids = numbers(asked), asked.all_token_ids
    (first,) = DECODERS[router](teller.payload(in_dram(*KEYS[:2])))
    assert (first.tag, first.hashes, first.parent) == ("BlockStored", blocks[:6], None)
    assert (first.tokens, first.block_size, first.tier) == (ids[: 2 * CHUNK], BLOCK, CPU[router])
    assert (first.lora_name, first.group, first.namespace) == (None, 0, None)
    (second,) = DECODERS[router](teller.payload(ChunksStored(NAMESPACE, "disk", KEYS[1], KEYS[2:], CHUNK)))
    assert (second.hashes, second.parent, second.tier) == (blocks[6:9], blocks[5], DISK[router])
    assert second.tokens == ids[2 * CHUNK : 3 * CHUNK]
    gone = DECODERS[router](teller.payload(ChunksRemoved(NAMESPACE, "dram", KEYS[:2])))
    assert [(it.tag, it.hashes, it.tier) for it in gone] == [
        ("BlockRemoved", blocks[:3], CPU[router]),
        ("BlockRemoved", blocks[3:6], CPU[router]),
        ("BlockRemoved", blocks[6:9], DISK[router]),
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_hashes_of_bytes_are_passed_on_as_vllm_passes_on_its_own(release: str) -> None:
    teller, asked = Teller(release, ints=False), request()
    teller.sees(asked)
    payload = teller.payload(in_dram(KEYS[0]))
    assert llm_d(payload)[0].hashes == numbers(asked)[:3]
    with pytest.raises(Undecoded, match="64 bits"):
        dynamo(payload, block_size=BLOCK)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("router", DECODERS)
def test_adapter_and_salt_are_told_as_vllm_tells_them(release: str, router: str) -> None:
    utils = Utils()
    lora = SimpleNamespace(lora_name="poet", lora_int_id=4)
    teller, asked = Teller(release, utils=utils), request(lora_request=lora, cache_salt="salt")
    teller.sees(asked)
    (told,) = DECODERS[router](teller.payload(in_dram(KEYS[0])))
    assert told.lora_name == "poet"
    assert told.namespace == ("salt" if router == "dynamo" else None)


def test_fields_have_what_vllm_gives_them() -> None:
    lora = SimpleNamespace(lora_name="poet", lora_int_id=4)
    teller, asked = Teller(), request(lora_request=lora)
    teller.sees(asked)
    teller.stream.news.append(in_dram(KEYS[0]))
    (told,) = teller.events.take()
    assert (told.lora_id, told.lora_name, told.medium) == (4, "poet", "CPU")
    assert told.extra_keys == [("poet",)] * 3
    assert (told.group_idx, told.kv_cache_spec_kind, told.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    assert (told.locality, told.ownership, told.session_id) == (None, None, None)


def test_every_group_that_needs_all_tokens_is_told_and_no_window() -> None:
    teller = Teller(groups=(WINDOW, FULL, FULL), kinds=(WINDOW_KIND, FULL_KIND, FULL_KIND))
    asked = request()
    teller.sees(asked)
    told = llm_d(teller.payload(in_dram(KEYS[0])))
    assert [(it.group, it.hashes) for it in told] == [(1, numbers(asked)[:3]), (2, numbers(asked)[:3])]
    gone = llm_d(teller.payload(NamespaceCleared(NAMESPACE)))
    assert [(it.tag, it.group) for it in gone] == [("BlockRemoved", 1), ("BlockRemoved", 2)]


def test_a_model_of_windows_alone_tells_nothing() -> None:
    teller = Teller(groups=(WINDOW,), kinds=(WINDOW_KIND,))
    teller.sees(request())
    assert llm_d(teller.payload(in_dram(KEYS[0]))) == []


def test_blocks_larger_than_vllms_hashes_are_told_by_vllms_rule() -> None:
    teller, asked = Teller(), request()
    teller.pool.hash_block_size = 2
    asked.block_hashes = block_hashes(asked.all_token_ids, 2)
    teller.sees(asked)
    (told,) = dynamo(teller.payload(in_dram(KEYS[0])), block_size=BLOCK)
    assert told.hashes == numbers(asked)[1:6:2]


def test_kinds_are_named_by_vllm_if_it_names_them() -> None:
    kinds = SimpleNamespace(
        get_kv_cache_spec_kind=lambda spec: SimpleNamespace(value=spec),
        get_kv_cache_spec_sliding_window=len,
    )
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec="mla_attention")])
    assert kinds_of(config, kinds) == [Kind("mla_attention", 13)]
    assert kinds_of(config, SimpleNamespace()) == [Kind(None, None)]


def test_prompts_that_part_within_a_chunk_share_blocks_and_the_index_stays_right() -> None:
    teller, index = Teller(), Index()
    first, second = (plain_request(tokens=2 * CHUNK) for _ in range(2))
    second.all_token_ids[CHUNK + BLOCK :] = range(900, 900 + CHUNK - BLOCK)
    for asked, keys in ((first, KEYS[:2]), (second, [KEYS[0], KEYS[2]])):
        asked.block_hashes = block_hashes(asked.all_token_ids, BLOCK)
        teller.sees(asked, keys)
    index.take(llm_d(teller.payload(ChunksStored(NAMESPACE, "disk", b"", KEYS[:1], CHUNK), in_dram(KEYS[1]))))
    index.take(llm_d(teller.payload(in_dram(KEYS[0]), in_dram(KEYS[2]))))
    assert index.blocks == {(block, "cpu") for block in numbers(first) + numbers(second)}
    (told,) = (told for told in index.tokens.items() if told[0] == numbers(second)[4])
    assert told[1] == (numbers(second)[3], tuple(range(900, 904)))
    index.take(llm_d(teller.payload(ChunksRemoved(NAMESPACE, "dram", [KEYS[1]]))))
    assert index.blocks == {(block, "cpu") for block in numbers(second)}


@pytest.mark.skipif(not PYTHON, reason="KVSERVER_DYNAMO_PYTHON names no Python with Dynamo")
@pytest.mark.parametrize("release", RELEASES)
def test_dynamos_own_indexer_finds_what_is_told(release: str) -> None:
    indexer = Indexer(block_tokens=BLOCK)
    try:
        teller, asked = Teller(release), request()
        teller.sees(asked)
        indexer.publish(teller.payload(in_dram(*KEYS[:2])))
        indexer.wait_for(asked.all_token_ids, {"cpu": 2 * CHUNK, "disk": 2 * CHUNK})
        indexer.publish(teller.payload(ChunksStored(NAMESPACE, "disk", KEYS[1], KEYS[2:], CHUNK)))
        indexer.wait_for(asked.all_token_ids, {"cpu": 2 * CHUNK, "disk": 3 * CHUNK})
        indexer.publish(teller.payload(ChunksRemoved(NAMESPACE, "dram", KEYS[:2])))
        indexer.wait_for(asked.all_token_ids, {"cpu": 0, "disk": 0})
    finally:
        indexer.close()


# ---------------------------------------------------------------- steps


def test_a_request_without_vllms_hashes_is_not_told() -> None:
    teller, asked = Teller(), request()
    asked.block_hashes = []
    teller.sees(asked)
    assert llm_d(teller.payload(in_dram(KEYS[0]))) == []
    assert not teller.events.pending


def test_when_vllm_has_cleared_its_own_cache_the_servers_chunks_are_told_again() -> None:
    teller, asked = Teller(), request()
    teller.sees(asked)
    before = teller.payload(in_dram(*KEYS))
    assert llm_d(teller.payload()) == []
    teller.pool.cached_block_hash_to_block = object()
    assert teller.payload() == before


def test_a_step_tells_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_events, "TOKENS_PER_STEP", CHUNK)
    teller = Teller()
    teller.sees(request())
    teller.stream.news.append(in_dram(*KEYS))
    sizes = []
    while not sizes or teller.events.pending:
        sizes.append(sum(len(told.token_ids) for told in teller.events.take()))
    assert max(sizes) == CHUNK
    assert sum(sizes) == len(KEYS) * CHUNK


def test_a_step_learns_no_longer_than_it_may() -> None:
    teller = Teller(now=ticking(1.0))
    teller.sees(request())
    teller.stream.news.append(in_dram(*KEYS))
    assert [len(told.block_hashes) for told in teller.events.take()] == [CHUNK // BLOCK]
    assert teller.events.pending


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on with each look."""
    looks = iter(range(10**6))
    return lambda: next(looks) * step_s


def test_a_bug_ends_the_events_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    teller.stream.news.append(Begun(0))
    teller.stream.take = lambda **_: 1 / 0  # type: ignore[assignment,method-assign]
    assert bench.admit(asked) == 0
    assert bench.half.take_events() == []
    assert bench.half.take_events() == []
    assert caplog.text.count("routers are told nothing more") == 1
    _, (order,) = bench.step(r=TOKENS)
    assert order.chunks == len(KEYS), "the cache goes on"


# ---------------------------------------------------------------- the scheduler half


def test_what_the_scheduler_names_is_told_once_the_server_holds_it() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.admit(asked)
    assert bench.half.take_events() == []
    _, (order,) = bench.step(r=TOKENS)
    teller.stream.news.append(in_dram(*split(order.keys)))
    (told,) = bench.half.take_events()
    assert told.block_hashes == numbers(asked)[: order.chunks * CHUNK // BLOCK]


def test_output_is_told_too() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.admit(asked)
    bench.step(r=TOKENS)
    asked.all_token_ids += range(7, 14)
    asked.num_tokens += 7
    asked.block_hashes = block_hashes(asked.all_token_ids, BLOCK)
    _, (order,) = bench.step(r=48)
    teller.stream.news.append(in_dram(*split(bench.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0))))
    told = bench.half.take_events()
    assert order.first_chunk == 3
    assert [block for it in told for block in it.block_hashes] == numbers(asked)
    assert [token for it in told for token in it.token_ids] == asked.all_token_ids


@pytest.mark.parametrize("on_disk", [0, 1])
def test_what_a_lookup_finds_in_dram_is_told_though_the_server_told_it_long_ago(on_disk: int) -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.hold(asked, 2)
    bench.server.chunks_on_disk = on_disk
    bench.admit(asked)
    told = [block for it in bench.half.take_events() for block in it.block_hashes]
    assert told == ([] if on_disk else numbers(asked)[: 2 * CHUNK // BLOCK])


def test_what_a_lookup_finds_is_not_told_while_batches_are_missing() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    teller.stream.is_followed = False
    bench.hold(asked, 2)
    bench.admit(asked)
    assert bench.half.take_events() == []


def test_an_idle_engine_steps_until_its_last_store_is_told_and_no_longer() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.admit(asked)
    bench.half.take_events()
    _, (order,) = bench.step(r=TOKENS)
    bench.half.finished("r")
    bench.half.ended([stored(order, order.chunks)])
    assert bench.half.busy()
    teller.stream.news.append(in_dram(*split(order.keys)))
    bench.half.take_events()
    while teller.events.pending:
        bench.half.take_events()
    assert not bench.half.busy()


@pytest.mark.parametrize("why", ["the server says nothing", "its events are not followed"])
def test_an_idle_engine_does_not_wait_for_events_that_do_not_come(why: str) -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    teller.stream.is_followed = why == "the server says nothing"
    bench.admit(asked)
    bench.half.take_events()
    _, (order,) = bench.step(r=TOKENS)
    bench.half.finished("r")
    bench.half.ended([stored(order, order.chunks)])
    assert bench.half.busy() == teller.stream.is_followed
    teller.clock_s += 1
    assert not bench.half.busy()


def test_after_a_reset_nothing_that_was_told_is_left() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.admit(asked)
    _, (order,) = bench.step(r=TOKENS)
    teller.stream.news.append(in_dram(*split(order.keys)))
    (told,) = bench.half.take_events()
    bench.half.finished("r")
    bench.half.reset()
    gone = [block for it in bench.half.take_events() for block in it.block_hashes]
    assert sorted(gone) == sorted(told.block_hashes)


def test_after_a_bug_of_the_cache_all_that_was_told_is_taken_back() -> None:
    teller, asked = Teller(), request()
    bench = Bench(events=teller.events)
    bench.admit(asked)
    _, (order,) = bench.step(r=TOKENS)
    teller.stream.news.append(in_dram(*split(order.keys)))
    (told,) = bench.half.take_events()
    bench.half.give_up()
    gone = [block for it in bench.half.take_events() for block in it.block_hashes]
    assert sorted(gone) == sorted(told.block_hashes)


def test_the_stream_is_closed_with_the_engine() -> None:
    teller = Teller()
    bench = Bench(events=teller.events)
    bench.half.close()
    assert teller.stream.closed


def split(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
