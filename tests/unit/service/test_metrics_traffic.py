"""/metrics under real traffic: each requested token and chunk has one result, and every counter moves."""

import random
import re

import pytest

from kvserver.brain.http.metrics import render
from kvserver.service.base.events import ArenaGrew, MoverGone
from kvserver.service.service import Service
from kvserver.service.telling.counters import LOOKUP_ENDS, LOOKUP_RESULTS, MODELS_MAX, OTHER_MODELS
from kvserver.wire.messages import KEY_BYTES, Await, Clear, Drain, Error, Found, GroupBlocks, Lookup, Pledge
from kvserver.wire.orders import DeviceIs, Listed, Order, Recover
from tests.rigs.bad_scene import change
from tests.rigs.brain_rig import CHUNK_TOKENS, FULL, NAMESPACE, SLAB_BYTES, STATE, WINDOW, Client, Rig, chain, ids
from tests.rigs.disk_rig import CHUNKS, DISK, DiskRig, cold_prompt, fill

OTHER = bytes(31) + b"\7"
REQUESTS = 10_000
PROMPT_MAX = 9
BLOCKS_OF = 3


def metrics(rig: Rig) -> dict[str, float]:
    """Sample -> value, as a scrape gets them."""
    text = render(rig.service.status(rig.now_ns), rig.service.counters, 0.0).decode()
    return {name: float(value) for name, value in re.findall(r"^kvserver_(\S+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def by_result(rig: Rig, name: str) -> dict[str, int]:
    seen = metrics(rig)
    of_each = re.compile(rf'{name}_total\{{(?:model="[^"]*",)?result="(\w+)"\}}')
    counts = dict.fromkeys(LOOKUP_RESULTS, 0)
    for sample, count in seen.items():
        if found := of_each.fullmatch(sample):
            counts[found[1]] += int(count)
    return counts


# ---------------------------------------------------------------- sums


class Traffic:
    """Random requests of two engines against a small arena and a disk, and sums of their replies."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # Two devices read in parallel: a prompt is declined when most of it lies on one of them.
        self.rig = DiskRig(disk_devices=2, disk_run_tokens=1, recompute_tokens_per_s=1_090_000)
        self.rig.disk_works = False
        no_check(self.rig.service)
        self.clients = [Client(self.rig, engine=name).register() for name in ("one", "other")]
        self.prompts = [chain(number, self.rng.randrange(1, PROMPT_MAX)) for number in range(60)]
        self.expected = dict.fromkeys(("dram", "disk", "unwanted", "asked", "known"), 0)
        self.held: list[Found] = []

    def step(self) -> None:
        self.rig.now_ns += self.rng.randrange(3_000_000)
        self.rig.finish_disk()
        client, keys = self.rng.choice(self.clients), self.rng.choice(self.prompts)
        match self.rng.randrange(10):
            case 0 | 1:
                client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(BLOCKS_OF * (len(keys) // KEY_BYTES))))))
            case 2 if self.held:
                client.release(self.held.pop(self.rng.randrange(len(self.held))))
            case 3 if self.held:
                found = self.rng.choice(self.held)
                client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(BLOCKS_OF * found.chunks)))))
            case 4:
                self.rig.wait_ms(self.rng.choice((1, 60)))
            case 5 if self.rng.random() < 0.02:
                client.ask(Clear(self.rig.number(), NAMESPACE))
            case _:
                self.look_up(client, keys)

    def look_up(self, client: Client, keys: bytes) -> None:
        tail = self.rng.choice((b"", b"", self.rng.randbytes(KEY_BYTES * self.rng.randrange(1, 5))))
        known = self.rng.random() < 0.95
        wanted = self.rng.choice((1, 1, 1, 4))
        keys = self.rng.choice((keys + tail, keys[: KEY_BYTES * self.rng.randrange(1, 1 + len(keys) // KEY_BYTES)]))
        reply = client.ask(Lookup(self.rig.number(), NAMESPACE if known else bytes(32), keys, wanted))
        if isinstance(reply, Error):
            assert (reply.family, reply.code) == ("resource", "leases")
            return
        expected = self.expected
        expected["asked"] += len(keys) // KEY_BYTES
        expected["known"] += len(keys) // KEY_BYTES if known else 0
        if reply.lease:
            expected["dram"] += reply.chunks - reply.chunks_on_disk
            expected["disk"] += reply.chunks_on_disk
            self.held.append(reply)
        else:
            expected["unwanted"] += reply.chunks


def no_check(service: Service) -> None:
    """Switches the check off: the simulator checks the invariants, and ten thousand more checks would take a minute."""
    service.check = lambda: None  # type: ignore[method-assign]


def test_results_sum_exactly_to_what_was_asked_over_ten_thousand_requests() -> None:
    traffic = Traffic(5)
    for _ in range(REQUESTS):
        traffic.step()
    rig, expected = traffic.rig, traffic.expected
    chunks, tokens = by_result(rig, "lookup_chunks"), by_result(rig, "lookup_tokens")
    assert sum(chunks.values()) == expected["asked"]
    assert sum(tokens.values()) == expected["known"] * CHUNK_TOKENS
    for result in ("dram", "disk", "unwanted"):
        assert chunks[result] == expected[result] > 0, result
        assert tokens[result] == chunks[result] * CHUNK_TOKENS
    assert tokens["declined"] == chunks["declined"] * CHUNK_TOKENS > 0
    unknown = expected["asked"] - expected["known"]
    assert tokens["miss"] == (chunks["miss"] - unknown) * CHUNK_TOKENS > 0
    seen = metrics(rig)
    ends = {why: seen[f'lookup_ends_total{{why="{why}"}}'] for why in LOOKUP_ENDS}
    assert sum(ends.values()) == seen['lookups_total{result="hit"}'] + seen['lookups_total{result="miss"}'] > 4000
    assert {why for why, lookups in ends.items() if lookups} >= {"whole", "absent", "gone", "declined", "namespace"}


# ---------------------------------------------------------------- tokens by model


def tokens_of(rig: Rig, model: str) -> dict[str, float]:
    """Lookup tokens by result, without zeros."""
    seen = metrics(rig)
    counts = {
        result: seen.get(f'lookup_tokens_total{{model="{model}",result="{result}"}}') for result in LOOKUP_RESULTS
    }
    return {result: count for result, count in counts.items() if count}


def test_tokens_are_counted_by_what_engines_call_their_model() -> None:
    rig = Rig()
    one = Client(rig, engine="one").register(model="llama")
    other = Client(rig, engine="other").register(namespace=OTHER, model='qwen "3" \\ 8b')
    one.store(chain(1, CHUNKS))
    one.lookup(chain(1, CHUNKS))
    other.ask(Lookup(rig.number(), OTHER, chain(1, CHUNKS + 1), 1))
    assert tokens_of(rig, "llama") == {"dram": CHUNKS * CHUNK_TOKENS}
    assert tokens_of(rig, r"qwen \"3\" \\ 8b") == {"miss": (CHUNKS + 1) * CHUNK_TOKENS}
    assert tokens_of(rig, "") == {}
    one.ask(Clear(rig.number(), NAMESPACE))
    one.lookup(chain(1, 1))
    assert tokens_of(rig, "llama")["miss"] == CHUNK_TOKENS, "a namespace that was cleared is still that model's"


def test_two_namespaces_of_a_model_are_counted_as_one() -> None:
    rig = Rig()
    for number, digest in enumerate((NAMESPACE, OTHER)):
        client = Client(rig, engine=f"engine {number}").register(namespace=digest, model="llama")
        client.ask(Lookup(rig.number(), digest, chain(number, 2), 1))
    assert tokens_of(rig, "llama") == {"miss": 4 * CHUNK_TOKENS}


def test_models_beyond_the_bound_are_counted_together() -> None:
    rig = Rig()
    client = Client(rig)
    for number in range(MODELS_MAX + 3):
        digest = bytes([1, number]) * 16
        client.register(name=f"kv {number}", namespace=digest, model=f"model {number}")
        client.ask(Lookup(rig.number(), digest, chain(1, 1), 1))
    models = rig.service.counters.lookup_tokens_by_model
    assert len(models) == MODELS_MAX + 1
    assert tokens_of(rig, f"model {MODELS_MAX - 2}") == {"miss": CHUNK_TOKENS}
    assert tokens_of(rig, OTHER_MODELS) == {"miss": 4 * CHUNK_TOKENS}
    assert by_result(rig, "lookup_tokens")["miss"] == (MODELS_MAX + 3) * CHUNK_TOKENS


def test_bytes_are_counted_by_worker() -> None:
    rig = Rig()
    keys = chain(1, CHUNKS)
    for rank, digest in enumerate((NAMESPACE, OTHER)):
        worker = Client(rig, ranks=2, rank=rank).register(namespace=digest)
        for _ in range(rank + 1):
            worker.store(keys)
            worker.ask(Clear(rig.number(), digest))
    seen = metrics(rig)
    one, other = (int(seen[f'worker_bytes_total{{kind="store",worker="{rank}"}}']) for rank in range(2))
    assert 0 < one == other / 2
    assert one + other == sum(count for name, count in seen.items() if name.startswith("mode_bytes_total"))
    assert not any(name.startswith('worker_bytes_total{kind="retrieve"') for name in seen)


def test_what_went_to_disk_counts_when_it_comes_back() -> None:
    """Effective reuse: promote / demote of kvserver_moved_bytes."""
    rig = DiskRig()
    client, keys = cold_prompt(rig)

    def moved() -> tuple[float, float]:
        seen = metrics(rig)
        demoted, promoted = (f'moved_bytes_total{{direction="{way}",tier="disk"}}' for way in ("demote", "promote"))
        return seen[demoted], seen[promoted]

    written, nothing = moved()
    assert written > nothing == 0
    assert by_result(rig, "lookup_tokens")["disk"] == 0
    client.release(client.lookup(keys))
    each = written / metrics(rig)['disk_moved_chunks_total{direction="demote"}']
    assert moved() == (written, CHUNKS * each)
    assert by_result(rig, "lookup_tokens")["disk"] == CHUNKS * CHUNK_TOKENS


# ---------------------------------------------------------------- why a prefix ends


def ends_of(rig: Rig) -> dict[str, int]:
    return {why: count for why, count in rig.service.counters.lookup_ends.items() if count}


def stores(rig: Rig) -> dict[str, float]:
    """Stores by result, without zeros."""
    head = 'stores_total{result="'
    counts = {name[len(head) : -2]: count for name, count in metrics(rig).items() if name.startswith(head)}
    return {result: count for result, count in counts.items() if count}


@pytest.mark.parametrize(("status", "result"), [("done", "whole"), ("abandoned", "abandoned"), ("failed", "failed")])
def test_a_store_is_counted_when_it_is_answered(status: str, result: str) -> None:
    """A counter that goes back would look like another server's, begun at 0."""
    rig = Rig()
    rig.movers_copy = False
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    assert client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))) is None
    assert stores(rig) == {}
    rig.finish(status, "io" if status == "failed" else "")
    assert stores(rig) == {result: 1}


def test_a_chunk_that_was_evicted_is_told_from_one_that_never_came() -> None:
    rig = Rig(arena_bytes=DISK["arena_bytes"])
    client = Client(rig).register()
    client.store(chain(1, CHUNKS))
    fill(client)
    client.lookup(chain(1, CHUNKS))
    client.lookup(chain(2, CHUNKS))
    client.lookup(chain(1023, CHUNKS))
    assert ends_of(rig) == {"gone": 1, "absent": 1, "whole": 1}


def test_a_chunk_that_is_being_stored_ends_the_prefix_as_such() -> None:
    rig = Rig()
    client = Client(rig).register()
    rig.movers_copy = False
    client.ask(client.storing(chain(1, CHUNKS), GroupBlocks(0, 0, ids(*range(9)))))
    client.lookup(chain(1, CHUNKS))
    rig.finish()
    client.lookup(chain(1, CHUNKS))
    assert ends_of(rig) == {"writing": 1, "whole": 1}


def test_a_window_that_was_not_stored_ends_the_prefix_as_partial() -> None:
    rig = Rig()
    client = Client(rig).register(groups=[FULL, WINDOW, STATE])
    client.ask(client.storing(chain(1, CHUNKS), GroupBlocks(0, 0, ids(*range(9)))))
    assert client.lookup(chain(1, CHUNKS)).chunks == 0
    assert ends_of(rig) == {"partial": 1}


def test_a_disk_that_is_away_is_told_from_one_that_is_too_slow() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    (mover,) = [mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk"]
    rig.handle(MoverGone(mover, "signal 9"))
    assert client.lookup(keys).chunks == 0
    assert ends_of(rig) == {"disk-away": 1}
    assert by_result(rig, "lookup_chunks")["declined"] == CHUNKS


# ---------------------------------------------------------------- causes of evictions


def evicted(rig: Rig) -> dict[str, float]:
    seen = metrics(rig)
    return {reason: seen[f'evicted_chunks_total{{reason="{reason}"}}'] for reason in ("store", "promote", "index")}


def test_evictions_are_told_apart_by_what_needed_the_room() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    stored = evicted(rig)
    assert stored == {"store": stored["store"], "promote": 0, "index": 0}
    assert stored["store"] == metrics(rig)["evicted_to_disk_chunks_total"] > 0
    assert client.lookup(keys).chunks_on_disk == CHUNKS
    assert evicted(rig) == {**stored, "promote": CHUNKS}, "each chunk that was read took the place of another"


def test_a_full_index_is_a_reason_of_its_own_and_what_it_costs_is_lost() -> None:
    rig = Rig(chunks_max=10)
    client = Client(rig).register()
    fill(client, prompts=5)
    assert evicted(rig) == {"store": 0, "promote": 0, "index": 5}
    assert metrics(rig)["evicted_to_disk_chunks_total"] == 0


# ---------------------------------------------------------------- everything moves

OF_THE_SHELL = {
    "snapshot_age_seconds",
    "replies_dropped_total",
    "lookup_handle_seconds",
    "ledger_damaged_entries_total",
}
CONFIGURED = {"arena_slabs", "chunks_max", "digests", "disk_total_bytes", "disk_daily_write_bytes"}
CONSTANT = {"build_info", "incarnation"}
MEASURED = {"disk_write_bytes_per_second", "disk_read_bytes_per_second"}
"""Rates measured over a megabyte at least, which no rig moves at once: test_placement."""
SCRUBBED = {"scrubbed_bytes_total", "scrub_round_seconds"}
REMOTE = {"remote_chunk_events_total", "remote_moved_bytes_total"}
ELSEWHERE = SCRUBBED | REMOTE | {"disk_rewritten_bytes_total", "disk_stalled_seconds", "unverified_shards_total"}
"""Metrics for scrubs, a remote store, changed record sizes, stalled devices and digests: test_scrub, tests/sim,
test_service_disk_sizes, test_disk_stalls, test_mismatches."""


class Watched:
    """Metrics that have changed in a rig since it was made."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.first = metrics(rig)
        self.moved: set[str] = set()

    def look(self) -> None:
        self.moved |= {family(name) for name, value in metrics(self.rig).items() if self.first.get(name) != value}


def family(sample: str) -> str:
    return re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", sample)


def a_prompt_is_awaited() -> Watched:
    rig = Rig()
    producer, other = (Client(rig, engine=name).register() for name in ("producer", "other"))
    watched = Watched(rig)
    producer.ask(Pledge(rig.number(), NAMESPACE, chain(1, CHUNKS), 1_000))
    assert other.ask(Await(rig.number(), NAMESPACE, chain(1, CHUNKS), 1)).awaited == CHUNKS
    producer.store(chain(1, CHUNKS))
    return watched


def test_every_metric_moves_with_real_traffic() -> None:
    """The simulator checks that each counter moves, and test_metrics that each reaches a sample."""
    traffic = Traffic(6)
    watched = [Watched(traffic.rig)]
    for step in range(600):
        traffic.step()
        if step % 7 == 0:
            watched[0].look()
    for scene in (
        a_device_fails_and_is_drained,
        a_damaged_device_is_found,
        an_arena_that_stops_growing,
        a_mover_dies_and_a_lease_runs_out,
        a_client_copies_itself,
        what_was_evicted_comes_back,
        a_prompt_is_awaited,
    ):
        watched.append(scene())
        watched[-1].look()
    known = {family(name) for each in watched for name in metrics(each.rig)}
    moved = set().union(*(each.moved for each in watched))
    assert known - moved == OF_THE_SHELL | CONFIGURED | CONSTANT | MEASURED | ELSEWHERE


def a_device_fails_and_is_drained() -> Watched:
    rig = DiskRig(disk_devices=2, disk_daily_write_bytes=24 * 90 * 4096, disk_second_touch=True)
    watched = Watched(rig)
    client = Client(rig).register()
    fill(client)
    for seed in range(1000, 1024):
        client.release(client.lookup(chain(seed, CHUNKS)))
    fill(client)
    rig.fault = "checksum"
    for seed in range(1000, 1024):
        client.release(client.lookup(chain(seed, CHUNKS)))
    rig.fault = None
    client.ask(Drain(rig.number(), 1))
    watched.look()
    rig.wait_ms(3_000)
    return watched


class DamagedRig(DiskRig):
    def _obey(self, mover: int, order: Order) -> None:
        if isinstance(order, Recover):
            self.report(mover, DeviceIs(0, 1 << 20, "", ""))
            self.report(mover, Listed(0, 3))
        else:
            super()._obey(mover, order)


def a_damaged_device_is_found() -> Watched:
    watched = Watched(DiskRig())
    watched.rig = DamagedRig()
    return watched


def a_client_copies_itself() -> Watched:
    rig = Rig()
    watched = Watched(rig)
    client = Client(rig)
    client.ask(change(client.registration(), mode="engine-driven"))
    return watched


def an_arena_that_stops_growing() -> Watched:
    rig = Rig()
    watched = Watched(rig)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, "no memory"))
    return watched


def a_mover_dies_and_a_lease_runs_out() -> Watched:
    rig = Rig(lease_ttl_ms=50)
    watched = Watched(rig)
    client = Client(rig).register()
    client.store(chain(1, CHUNKS))
    client.lookup(chain(1, CHUNKS))
    rig.wait_ms(200)
    rig.movers_copy = False
    client.ask(client.storing(chain(2, CHUNKS), GroupBlocks(0, 0, ids(*range(9)))))
    watched.look()
    (mover,) = rig.service.status(rig.now_ns).movers
    rig.handle(MoverGone(mover.mover, "signal 9"))
    return watched


def what_was_evicted_comes_back() -> Watched:
    """Recent and frequent chunks in an arena of one slab."""
    rig = Rig(arena_bytes=SLAB_BYTES, eviction_policy="arc")
    client = Client(rig).register()
    watched = Watched(rig)
    client.store(chain(1, CHUNKS))
    client.release(client.lookup(chain(1, CHUNKS)))
    fill(client)
    for seed in (1018, 1019, 1):
        client.store(chain(seed, CHUNKS))
    return watched
