"""Jobs of the mover's device engine: their paths and ends. No job waits for a client that never answers.

The test plays the client's side of the rings: it takes, finishes, faults or forgets segments.
"""

from collections.abc import Iterator

import pytest

from kvserver.transfer.native import ABANDONED, DONE, FAILED, SUBMITTED
from kvserver.wire.messages import STAGING_SEGMENTS
from tests.device.conftest import VENDORS
from tests.device.mover_rig import RETRIEVE, STORE, Halves
from tests.device.simulated import CODE, HANG, STICKY, Machine
from tests.process.harness import until

LANES = {"store": STORE, "retrieve": RETRIEVE}
SMALL, LARGE = 333, 70_001
"""Page sizes: a job with LARGE pages has several segments (420 KB a chunk, segments of 1 MiB)."""
SEGMENTS = STAGING_SEGMENTS // len(LANES)
"""Segments of a lane."""


@pytest.fixture(scope="module", params=VENDORS)
def bench(request: pytest.FixtureRequest) -> Iterator[tuple[Machine, Halves]]:
    """A machine with an engine that packs everything, shared by many tests."""
    with Machine(request.param) as machine, Halves(machine) as halves:
        yield machine, halves


@pytest.fixture
def halves(bench: tuple[Machine, Halves]) -> Halves:
    return bench[1]


def serve(halves: Halves, cache: int, lane: int) -> None:
    """Plays the client for one segment."""
    halves.rig.call("take", cache, lane)
    halves.rig.call("done", cache, lane)


def run(halves: Halves, kind: str, cache: int, mode: str, *, packed_by_client: bool = False) -> str:
    """Runs a job of three chunks; returns the mode that was used."""
    job = halves.submit(kind, cache, 3, mode)
    if packed_by_client:
        serve(halves, cache, LANES[kind])
    completion = halves.wait(job)
    assert completion[1:3] == ("done", 3 * 3 * 2 * SMALL)
    assert completion[4:6] == ("", "")
    assert halves.rig.call("state", job) == DONE
    went: str = completion[6]
    return went


@pytest.mark.parametrize("arena_reach", ["register", "bounce"])
def test_short_copies_are_packed_by_whom_the_cache_says(machine: Machine, arena_reach: str) -> None:
    with Halves(machine, arena_reach=arena_reach, direct_from=3 * SMALL + 1) as halves:  # three blocks are adjacent
        staged, bare = halves.map(SMALL, staged=True), halves.map(SMALL, staged=False)
        for kind in LANES:
            assert run(halves, kind, staged, "staged", packed_by_client=True) == "staged"
            assert run(halves, kind, bare, "server-gather") == "server-gather"
            assert run(halves, kind, bare, "direct") == "direct"


def test_long_copies_go_direct_whatever_the_cache_brought(machine: Machine) -> None:
    with Halves(machine, direct_from=3 * SMALL) as halves:
        staged, bare = halves.map(SMALL, staged=True), halves.map(SMALL, staged=False)
        for kind in LANES:
            for cache, mode in ((staged, "staged"), (bare, "server-gather"), (bare, "direct")):
                assert run(halves, kind, cache, mode) == "direct"


def test_copies_go_direct_sooner_where_nobody_else_would_pack(machine: Machine) -> None:
    """Packing by the mover costs the engine time on the GPU; packing by the client does not."""
    with Halves(machine, direct_from=3 * SMALL + 1, bare_direct_from=3 * SMALL) as halves:
        staged, bare = halves.map(SMALL, staged=True), halves.map(SMALL, staged=False)
        for kind in LANES:
            assert run(halves, kind, staged, "staged", packed_by_client=True) == "staged"
            assert run(halves, kind, staged, "server-gather") == "direct"
            assert run(halves, kind, bare, "server-gather") == "direct"


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_job_of_many_segments_goes_round_the_ring(halves: Halves, kind: str) -> None:
    cache = halves.map(LARGE, staged=True)
    for _ in range(2):
        job = halves.submit(kind, cache, 10)
        served = 0
        while halves.rig.call("state", job) != DONE:
            if halves.rig.call("asked", cache, LANES[kind], 0.01):
                halves.rig.call("done", cache, LANES[kind])
                served += 1
        assert served > 4
        assert halves.wait(job)[1] == "done"


@pytest.mark.parametrize("kind", ["store", "retrieve"])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_cancelled_job_ends_though_the_client_never_answers(halves: Halves, kind: str, taken: int) -> None:
    """Segments asked for are withdrawn; a taken one stays with the client until it comes back."""
    lane = LANES[kind]
    cache = halves.map(LARGE, staged=True)
    job = halves.submit(kind, cache, 10)
    for _ in range(taken):
        assert halves.rig.call("take", cache, lane) == job
    halves.rig.call("cancel", job)
    assert halves.wait(job)[1] == "abandoned"
    assert halves.rig.call("state", job) == FAILED
    assert not halves.rig.call("asked", cache, lane, 0.0)
    second = halves.submit(kind, cache, 1)
    for _ in range(taken):
        halves.rig.call("done", cache, lane)
    serve(halves, cache, lane)
    assert halves.wait(second)[1] == "done"


def test_a_cancelled_job_waits_for_its_copies(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    cache = halves.map(LARGE, staged=True)
    with machine.rule("run:copy", HANG, pid=halves.rig.pid) as rule:
        job = halves.submit("retrieve", cache, 2)
        until("a copy to hang", rule.met)
        halves.rig.call("cancel", job)
        assert halves.rig.call("state", job) == SUBMITTED
    assert halves.wait(job)[1] == "abandoned"
    assert not halves.rig.call("asked", cache, RETRIEVE, 0.0)


def test_a_job_waits_for_its_part_of_the_arena(machine: Machine) -> None:
    with Halves(machine, arena_reach="register", slabs=1) as halves:
        cache = halves.map(SMALL, staged=False)
        first = halves.submit("store", cache, 4, "server-gather")  # all in the first slab
        assert halves.wait(first)[1] == "done"
        waiting, given_up = (
            halves.submit("store", cache, 5, "server-gather"),
            halves.submit("store", cache, 6, "server-gather"),
        )
        halves.rig.call("cancel", given_up)
        assert halves.wait(given_up)[1] == "abandoned"
        halves.rig.call("arena_ready", 4)
        assert halves.wait(waiting)[1] == "done"


def test_while_jobs_run_only_what_they_need_of_the_arena_is_registered(machine: Machine) -> None:
    """Registering blocks other calls of the process, and for a large arena takes many seconds."""
    with Halves(machine, arena_reach="register", slabs=1) as halves:
        staged, bare = halves.map(SMALL, staged=True), halves.map(SMALL, staged=False)
        running = halves.submit("store", staged, 3)
        halves.rig.call("take", staged, STORE)
        with machine.rule("host_register", HANG, skip=1, pid=halves.rig.pid) as more:
            halves.rig.call("arena_ready", 4)
            for _ in range(20):
                assert halves.wait(halves.submit("store", bare, 5, "server-gather"))[1] == "done"  # the second slab too
            assert not more.met()
            halves.rig.call("done", staged, STORE)
            assert halves.wait(running)[1] == "done"
            until("the rest of the arena to be registered", more.met)


def test_a_store_that_the_client_gave_up_ends_as_abandoned(halves: Halves) -> None:
    cache = halves.map(LARGE, staged=True)
    job = halves.submit("store", cache, 10)
    halves.rig.call("take", cache, STORE)
    assert halves.rig.call("abandon_store", job) == ABANDONED
    assert halves.wait(job)[1] == "abandoned"
    assert halves.rig.call("state", job) == ABANDONED


def test_a_second_job_on_a_word_moves_nothing_and_leaves_the_word_to_the_first(halves: Halves) -> None:
    """Otherwise the client would take its blocks for free while the first job still copies."""
    cache = halves.map(LARGE, staged=True)
    first = halves.submit("store", cache, 3)
    halves.rig.call("take", cache, STORE)
    second = halves.submit_on_the_word_of(first, "store", cache, 3)
    assert halves.wait(second)[1] == "abandoned"
    assert halves.rig.call("state", first) == SUBMITTED
    halves.rig.call("cancel", first)
    assert halves.wait(first)[1] == "abandoned"
    assert halves.rig.call("state", first) == FAILED


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_fault_of_the_client_fails_its_job_only(halves: Halves, kind: str) -> None:
    lane = LANES[kind]
    cache = halves.map(LARGE, staged=True)
    job = halves.submit(kind, cache, 2)
    halves.rig.call("take", cache, lane)
    halves.rig.call("fault", cache, lane)
    completion = halves.wait(job)
    assert (completion[1], completion[4]) == ("failed", "client-copy")
    assert halves.rig.call("state", job) == FAILED
    job = halves.submit(kind, cache, 1)
    serve(halves, cache, lane)
    assert halves.wait(job)[1] == "done"


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_segments_that_a_client_faulted_serve_the_jobs_after_them(halves: Halves, kind: str) -> None:
    cache = halves.map(SMALL, staged=True)
    for _ in range(SEGMENTS):
        job = halves.submit(kind, cache, 1)
        halves.rig.call("take", cache, LANES[kind])
        halves.rig.call("fault", cache, LANES[kind])
        assert halves.wait(job)[1] == "failed"
    for _ in range(SEGMENTS):
        assert run(halves, kind, cache, "staged", packed_by_client=True) == "staged"


@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_client_that_does_not_answer_holds_up_nobody_else(halves: Halves, kind: str) -> None:
    silent, other, bare = (halves.map(LARGE, staged=staged) for staged in (True, True, False))
    stuck = halves.submit(kind, silent, 10)
    halves.rig.call("take", silent, LANES[kind])
    job = halves.submit(kind, other, 1)
    serve(halves, other, LANES[kind])
    assert halves.wait(job)[1] == "done"
    assert halves.wait(halves.submit(kind, bare, 5, "server-gather"))[1] == "done"
    halves.rig.call("cancel", stuck)
    assert halves.wait(stuck)[1] == "abandoned"


def test_a_retrieve_does_not_wait_for_the_stores_before_it(halves: Halves) -> None:
    """Each direction has its own lanes: waiting for a prefix does not wait for other requests' stores."""
    cache = halves.map(SMALL, staged=True)
    stores = [halves.submit("store", cache, 3, "staged") for _ in range(2)]
    retrieve = halves.submit("retrieve", cache, 3, "staged")
    serve(halves, cache, RETRIEVE)
    assert halves.wait(retrieve)[1] == "done"
    for store in stores:
        assert halves.rig.call("state", store) != DONE
        serve(halves, cache, STORE)
        assert halves.wait(store)[1] == "done"


def test_a_driver_that_fails_on_the_data_path_breaks_the_engine(machine: Machine) -> None:
    with Halves(machine) as halves:
        cache = halves.map(LARGE, staged=False)
        with machine.rule("event_query", STICKY, code=700, pid=halves.rig.pid):
            halves.submit("store", cache, 2, "server-gather")
            completion = halves.wait(0)
        assert (completion[1], completion[4]) == ("broken", "device")
        assert "700" in completion[5]


def test_a_cache_is_unmapped_after_its_last_job(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = halves.rig.call("imports")
    cache = halves.map(LARGE, staged=True)
    with machine.rule("run:copy", HANG, pid=halves.rig.pid) as rule:
        jobs = [halves.submit("retrieve", cache, 1) for _ in range(2)]
        until("a copy to hang", rule.met)
        halves.rig.call("unmap", cache)
        assert halves.rig.call("imports") == imported + 2
        for job in jobs:
            halves.rig.call("cancel", job)
    ends = [completion[:2] for completion in halves.rig.call("completions", 3)]
    assert sorted(ends[:2]) == [(job, "abandoned") for job in jobs]
    assert ends[2:] == [(cache, "unmapped")]
    assert halves.rig.call("imports") == imported


def test_a_cache_that_leaves_while_it_is_mapped_says_both(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = len(machine.importers())
    with machine.rule("ipc_open", HANG) as rule:
        cache = halves.begin_map(SMALL, staged=True)
        until("an import to hang", rule.met)
        halves.rig.call("unmap", cache)
    ends = [completion[:2] for completion in halves.rig.call("completions", 2)]
    assert ends == [(cache, "mapped"), (cache, "unmapped")]
    assert len(machine.importers()) == imported


def test_caches_of_one_allocation_share_its_import(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = len(machine.importers())
    pool = halves.memory.call("take", 60 * SMALL)
    caches = [halves.begin_map_of(pool, SMALL) for _ in range(2)]
    assert [completion[:2] for completion in halves.rig.call("completions", 2)] == [
        (cache, "mapped") for cache in caches
    ]
    assert len(machine.importers()) == imported + 1
    halves.unmap(caches[0])
    assert halves.wait(halves.submit("store", caches[1], 2, "server-gather"))[1] == "done"
    halves.unmap(caches[1])
    assert len(machine.importers()) == imported


def test_refusals_have_a_code_and_leave_nothing_open(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = len(machine.importers())
    handle, size = halves.memory.call("take", 60 * SMALL)
    staging = halves.memory.call("take", 1 << 20)
    for code, pool, brought in (
        ("handle", ("5a" * 64, size), None),
        ("handle-size", (handle, size + 1), None),
        ("layout", (handle, 60 * SMALL - 1), None),
        ("handle-size", (handle, size), staging),
    ):
        completion = halves.wait(halves.begin_map_of(pool, SMALL, brought))
        assert (completion[1], completion[4]) == ("refused", code), completion
        assert len(machine.importers()) == imported


def test_a_refused_cache_keeps_nothing_of_an_allocation_that_another_has_open(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = len(machine.importers())
    handle, size = halves.memory.call("take", 60 * SMALL)
    cache = halves.begin_map_of((handle, size), SMALL)
    assert halves.wait(cache)[1] == "mapped"
    refused = halves.wait(halves.begin_map_of((handle, size + 1), SMALL))
    assert (refused[1], refused[4]) == ("refused", "handle-size"), refused
    assert halves.wait(halves.submit("store", cache, 2, "server-gather"))[1] == "done"
    halves.unmap(cache)
    assert len(machine.importers()) == imported


def test_memory_of_which_the_driver_tells_no_size_is_closed_again(bench: tuple[Machine, Halves]) -> None:
    machine, halves = bench
    imported = len(machine.importers())
    pool = halves.memory.call("take", 60 * SMALL)
    with machine.rule("address_range", CODE, code=1, pid=halves.rig.pid) as rule:
        completion = halves.wait(halves.begin_map_of(pool, SMALL))
        assert rule.met()
    assert (completion[1], completion[4]) == ("refused", "handle"), completion
    assert len(machine.importers()) == imported


def test_closing_ends_every_job_once(machine: Machine) -> None:
    with Halves(machine) as halves:
        cache = halves.map(LARGE, staged=True)
        jobs = {halves.submit(kind, cache, 10) for kind in ("store", "retrieve", "store", "retrieve")}
        halves.rig.call("take", cache, STORE)
        ends = halves.rig.call("close")
    assert {completion[0] for completion in ends} == jobs
    assert [completion[1] for completion in ends] == ["abandoned"] * len(jobs)
