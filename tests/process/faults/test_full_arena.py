"""A full arena and leases that expire: a store reports the truth, and no promised chunk is evicted."""

from tests.process.engine import SMALL, Engine, prompt
from tests.process.harness import Server, until

SLAB_BYTES = 64 << 10
ARENA_BYTES = 1 << 20
SLOTS = ARENA_BYTES // SLAB_BYTES * (SLAB_BYTES // SMALL.slot_bytes())


def small_server(**settings: object) -> Server:
    return Server(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, **settings)


def test_a_full_arena_gives_up_what_was_not_used_for_longest() -> None:
    with small_server() as server, Engine(server.path) as engine:
        engine.ready()
        until("the arena to be ready", lambda: server.status().arena.slabs_ready == ARENA_BYTES // SLAB_BYTES)
        stories = [prompt(seed, chunks=7) for seed in range(2 * SLOTS // 7)]
        for story in stories:
            assert engine.store(story).chunks == 7
            assert engine.retrieve(stories[0]) == 7, "what is used all the time stays"
        status = server.status()
        assert status.arena.used_bytes == status.chunks * SMALL.slot_bytes() <= ARENA_BYTES
        assert status.counters["evictions"]
        found = [engine.retrieve(story) for story in stories]
        assert found[-1] == 7
        assert found[1] == 0
        assert sum(found) == server.status().chunks, "every chunk that is held is servable: heads outlive their tails"


def test_what_is_leased_stays_and_the_store_says_how_far_it_came() -> None:
    with small_server() as server, Engine(server.path) as engine:
        engine.ready()
        until("the arena to be ready", lambda: server.status().arena.slabs_ready == ARENA_BYTES // SLAB_BYTES)
        stories = [prompt(seed, chunks=13) for seed in range(SLOTS // 13)]
        leases = []
        for story in stories:
            assert engine.store(story).chunks == 13
            leases.append(engine.lookup(story).lease)
        left = SLOTS - 13 * len(stories)
        late = prompt(999, chunks=15)
        result = engine.store(late)
        assert (result.chunks, result.why) == (left, "full")
        assert engine.retrieve(late) == left
        for story, lease in zip(stories, leases, strict=True):
            assert lease is not None
            where = engine.place(story)
            assert engine.begin_retrieve(lease, where).result(20).ok
            engine.pool.expect(story, where)
            assert engine.pool.wrong() == 0
        assert engine.store(late).chunks == 15
        assert engine.retrieve(late) == 15


def test_a_lease_that_ran_out_is_a_miss_and_writes_nothing() -> None:
    with small_server(lease_ttl_ms=200) as server, Engine(server.path) as engine:
        story = prompt(1, chunks=5)
        engine.ready().store(story)
        found = engine.lookup(story)
        assert found.lease is not None
        until("the lease to run out", lambda: server.status().leases == 0)
        where = engine.place(story)
        engine.pool.spoil(where)
        result = engine.begin_retrieve(found.lease, where).result(20)
        assert (result.ok, result.why) == (False, "lease-unknown")
        assert engine.pool.wrong() == 0
        assert server.status().pins == 0
        assert engine.retrieve(story) == 5
