"""Device jobs with digests: sums are right in every mode, and no error between engine and arena goes unnoticed."""

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvserver.transfer.native import DONE, FAILED, NO_DIGEST, digest_sum
from tests.device.conftest import VENDORS
from tests.device.digest_rig import (
    MODES,
    PRIME,
    REACHES,
    Halves,
    Mover,
    Planted,
    Scene,
    many_faults,
    stretches_of,
    with_sums,
)
from tests.device.mover_rig import RETRIEVE, STORE
from tests.device.simulated import CODE, CORRUPT, DELAY, HANG, Machine
from tests.process.harness import until
from tests.rigs.oracle_plan import CopyGroup, Group, Run
from tests.rigs.slow_digest import slow_sum

SEEDS_EACH = 3
FAULTS_EACH = 7
SEGMENTS = 8
GRACE_S = 0.05
"""In which a mover that is wrong would begin too early."""
PLACES = [(mode, reach) for mode in MODES for reach in REACHES]


@pytest.fixture(scope="module", params=VENDORS)
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    with Machine(request.param) as machine, Halves(machine) as made:
        yield made


@pytest.mark.parametrize(("mode", "reach"), PLACES)
def test_sums_are_right_and_every_planted_error_is_noticed(halves: Halves, mode: str, reach: str) -> None:
    """Random layouts; whole chunks and parts of them."""
    first = SEEDS_EACH * (PLACES.index((mode, reach)) + len(PLACES) * VENDORS.index(halves.machine.vendor))
    met: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_EACH):
        with Scene(halves, mode, reach, seed) as scene:
            many_faults(scene, FAULTS_EACH, lambda what: met.update([what]))
    assert met.total() == SEEDS_EACH * FAULTS_EACH


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_judged_before_a_late_device_has_summed_it(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 12) as scene:
        halves.machine.delay_operations(3000)
        try:
            stored = scene.store()
            assert scene.run("retrieve", stored).status == "done"
            assert scene.run("retrieve", scene.part(stored)).status == "done"
        finally:
            halves.machine.delay_operations(0)


@pytest.mark.parametrize("mode", MODES)
def test_sums_are_those_of_the_slow_formula(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 2) as scene:
        stored = scene.store()
        payloads = [scene.arena[slot : slot + size] for slot, size in scene.shards(stored)]
        assert [value for copy in stored for value in copy.sums] == [slow_sum(payload) for payload in payloads]


@pytest.mark.parametrize("mode", ["server-gather", "direct"])
def test_shards_that_are_longer_than_any_before_are_summed_whole(halves: Halves, mode: str) -> None:
    """The mover's tables grow for them. What a direct retrieve leaves out of one is summed in several turns."""
    page = 700_001
    mover = Mover(halves.machine, MODES[mode][0], "register")
    try:
        for per_chunk, size in ((3, 5), (3, page)):
            scene = Scene(halves, mode, "register", 4)
            scene.mover, scene.arena = mover, mover.arena
            scene.groups, scene.bytes = [Group(per_chunk, per_chunk, (Run(0, 0, 1, 0, size, size),))], per_chunk * size
            with scene:
                stored = scene.store()
                scene.retrieve(stored)
                middle = [CopyGroup(0, 1, (0,), stored[0].slots, stored[0].sums)]
                scene.retrieve(middle)
                for at in (0, size - 1, 2 * size, 3 * size - 1):
                    scene.arena[at] ^= 1
                    scene.fails(middle, Planted("flipped bit", [0]))
                    scene.arena[at] ^= 1
    finally:
        mover.close()


@pytest.mark.parametrize("mode", MODES)
def test_chunks_to_skip_have_no_sum_and_unknown_sums_are_not_compared(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 11) as scene:
        stored = scene.store(scene.whole(skips=True))
        sums = scene.sums_of(stored)
        assert len(sums) > 2
        for nth, (slot, _) in enumerate(scene.shards(stored)):
            scene.arena[slot] ^= 4
            scene.fails(stored, Planted("flipped bit", [nth]))
            scene.retrieve(with_sums(stored, [*sums[:nth], NO_DIGEST, *sums[nth + 1 :]]))
            scene.arena[slot] ^= 4
        scene.retrieve(with_sums(stored, [NO_DIGEST] * len(sums)))


@pytest.mark.parametrize("mode", MODES)
def test_without_digests_nothing_is_summed(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 5) as scene:
        copies = scene.whole()
        end = scene.run("store", copies, digests=False)
        assert (end.status, end.sums) == ("done", [])
        scene.arena[scene.shards(copies)[0][0]] ^= 1
        end = scene.run("retrieve", with_sums(copies, [7] * len(scene.shards(copies))), digests=False)
        assert (end.status, end.wrong, end.word) == ("done", [], DONE)


@pytest.mark.parametrize("mode", MODES)
def test_a_retrieve_must_bring_a_sum_for_each_slot(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 5) as scene:
        copies = scene.whole()
        assert scene.run("retrieve", copies)[:2] == ("invalid", "sums")
        cut = [CopyGroup(*copy[:4], copy[4][:-1]) for copy in map(_fields, scene.store(copies))]
        assert scene.run("retrieve", cut)[:2] == ("invalid", "sums")


def _fields(copy: CopyGroup) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return copy.group, copy.first_block, copy.block_ids, copy.slots, copy.sums


# ---------------------------------------------------------------- a client that says something else

LIES = {
    "another sum": lambda total, size: ((total + 1) % PRIME, size),
    "a sum beyond all": lambda total, size: (total + PRIME, size),
    "the largest number": lambda total, size: (2**64 - 1, size),
    "a byte less": lambda total, size: (total, size - 1),
    "a byte more": lambda total, size: (total, size + 1),
    "nothing": lambda total, size: (0, 0),
    "no end of bytes": lambda total, size: (total, 2**64 - 1),
}


class Played:
    """The client's answers for one job, as a test wants them."""

    def __init__(self, scene: Scene, lane: int) -> None:
        self.scene = scene
        self.lane = lane

    def answer(self, shards: list[tuple[int, int]], lie: str = "", at: int = -1) -> list[int]:
        """Answers until every shard was asked for. Says of shard `at` what is not so; returns the works asked."""
        nth, works = 0, []
        while nth < len(shards):
            nth, work = self.answer_one(shards, nth, lie, at)
            works.append(work)
        return works

    def answer_one(self, shards: list[tuple[int, int]], nth: int = 0, lie: str = "", at: int = -1) -> tuple[int, int]:
        """Answers for one segment, which begins in shard `nth`. Returns the shard after it, and the work asked."""
        segment, sequence, _, work, packed = self.scene.halves.client.call("take", self.lane)
        said = array("Q")
        for begin, end in stretches_of(packed):
            slot, size = shards[nth]
            total, length = digest_sum(self.scene.arena[slot + begin : slot + end], 0, end - begin, begin)
            said.extend(LIES[lie](total, length) if lie and nth == at and end == size else (total, length))
            nth += end == size
        self.scene.halves.client.call("done", self.lane, segment, sequence, said.tobytes())
        return nth, work


@pytest.mark.parametrize("mode", ["staged", "direct with a ring"])
def test_the_sums_of_a_client_are_believed_only_if_they_are_right(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 6, played=True) as scene:
        scene.arena[:] = scene.rng.randbytes(len(scene.arena))
        copies = scene.whole()
        sums, shards = scene.sums_of(copies), scene.shards(copies)
        copies = with_sums(copies, sums)
        client = Played(scene, RETRIEVE)
        for number, lie in enumerate(["", *LIES]):
            at = number % len(shards)
            scene.begin("retrieve", copies)
            works = client.answer(shards, lie, at)
            end = scene.end()
            assert set(works) == {2 if scene.expected_mode == "direct" else 1}
            if lie:
                assert (end.status, end.code, end.wrong) == ("failed", "digest", [at]), lie
            else:
                assert (end.status, end.code) == ("done", "")


@pytest.mark.parametrize("mode", ["staged", "direct with a ring"])
def test_zeros_that_a_client_did_not_sum_are_not_taken_as_summed(halves: Halves, mode: str) -> None:
    """Their sum is 0, as that of no bytes."""
    with Scene(halves, mode, "register", 6, played=True) as scene:
        scene.arena[:] = bytes(len(scene.arena))
        copies = scene.whole()
        shards = scene.shards(copies)
        client = Played(scene, RETRIEVE)
        for at in range(len(shards)):
            scene.begin("retrieve", with_sums(copies, [0] * len(shards)))
            client.answer(shards, "nothing", at)
            end = scene.end()
            assert (end.status, end.code, end.wrong) == ("failed", "digest", [at])


@pytest.mark.parametrize("mode", ["staged", "direct with a ring"])
def test_a_store_whose_client_says_impossible_sums_fails(halves: Halves, mode: str) -> None:
    with Scene(halves, mode, "register", 6, played=True) as scene:
        shards = scene.shards(scene.whole())
        client = Played(scene, STORE)
        for lie in ["", *LIES]:
            scene.begin("store", scene.whole())
            client.answer(shards, lie, len(shards) - 1)
            end = scene.end()
            if lie in ("", "another sum"):  # the retrieve will notice it
                assert (end.status, len(end.sums)) == ("done", len(shards))
            else:
                assert (end.status, end.code, end.sums, end.word) == ("failed", "digest", [], FAILED), lie


# ---------------------------------------------------------------- direct retrieves of several stretches and passes


PAGE = 200


def long_scene(halves: Halves, mode: str, *, played: bool = False) -> Scene:
    """Four DMAs of 819,200 bytes at most, and passes of 1 MiB. A chunk has two regions."""
    scene = Scene(halves, mode, "register", 8, played=played)
    blocks = 8000
    scene.groups, scene.bytes = [Group(4, blocks, (Run(0, 0, 2, blocks * PAGE, PAGE, PAGE),))], 2 * blocks * PAGE
    return scene


def test_a_direct_retrieve_sums_what_has_landed_while_its_last_bytes_are_on_their_way(halves: Halves) -> None:
    with long_scene(halves, "direct with a ring", played=True) as scene:
        scene.arena[:] = scene.rng.randbytes(len(scene.arena))
        copies = scene.whole()
        copies, shards = with_sums(copies, scene.sums_of(copies)), scene.shards(copies)
        client, pid = Played(scene, RETRIEVE), scene.mover.half.pid
        with halves.machine.rule("run:copy", DELAY, pid=pid) as rule:
            scene.begin("retrieve", copies)
            client.answer(shards)
            assert scene.end().status == "done"
        with halves.machine.rule("run:copy", HANG, pid=pid, skip=rule.met() - 1) as rule:
            scene.begin("retrieve", copies)
            until("the last copy to begin", rule.met)
            nth, _ = client.answer_one(shards)
            assert 0 < nth < len(shards)
        while nth < len(shards):
            nth, _ = client.answer_one(shards, nth)
        assert scene.end().status == "done"


@pytest.mark.parametrize("late", ["first", "last"])
@pytest.mark.parametrize("mode", ["direct with a ring", "direct"])
def test_bytes_are_not_summed_before_they_have_landed(halves: Halves, mode: str, late: str) -> None:
    """If the first copy of one stream hangs, those of the other stream land before it: about half of all bytes."""
    with long_scene(halves, mode) as scene:
        stored, pid = scene.store(), scene.mover.half.pid
        scene.retrieve(stored)  # the mover takes its memory
        with halves.machine.rule("run:copy", DELAY, pid=pid) as rule:
            scene.retrieve(stored)
        scene.compute()

        def landed_pages() -> int:
            pool = halves.client.call("read", scene.bytes)
            return sum(pool[at : at + PAGE] != scene.shadow[at : at + PAGE] for at in range(0, scene.bytes, PAGE))

        skip = rule.met() - 1 if late == "last" else 0
        with halves.machine.rule("run:copy", HANG, pid=pid, skip=skip, times=1) as rule:
            scene.begin("retrieve", stored)
            until("a copy to hang", rule.met)
            until("other copies to land", lambda: landed_pages() > scene.bytes // PAGE * 0.48)
            time.sleep(GRACE_S)
        end = scene.end()
        assert (end.status, end.wrong) == ("done", [])


def test_a_direct_retrieve_is_cancelled_between_its_copies_and_its_passes(halves: Halves) -> None:
    """Its last copy hangs, one pass is at the client, and the next one waits for its bytes."""
    with long_scene(halves, "direct with a ring", played=True) as scene:
        copies, pid = scene.whole(), scene.mover.half.pid
        copies = with_sums(copies, scene.sums_of(copies))
        client = Played(scene, RETRIEVE)
        with halves.machine.rule("run:copy", DELAY, pid=pid) as rule:
            scene.begin("retrieve", copies)
            client.answer(scene.shards(copies))
            assert scene.end().status == "done"
        with halves.machine.rule("run:copy", HANG, pid=pid, skip=rule.met() - 1) as rule:
            scene.begin("retrieve", copies)
            until("the last copy to begin", rule.met)
            halves.client.call("take", RETRIEVE)
            scene.mover.half.call("cancel", scene.JOB)
        end = scene.end()
        assert (end.status, end.wrong, end.word) == ("abandoned", [], FAILED)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("lane", [STORE, RETRIEVE])
def test_a_direct_job_whose_client_does_not_answer_ends_when_it_is_cancelled(
    halves: Halves, lane: int, taken: bool
) -> None:
    with Scene(halves, "direct with a ring", "register", 6, played=True) as scene:
        copies = scene.whole()
        kind = "store" if lane == STORE else "retrieve"
        scene.begin(kind, with_sums(copies, scene.sums_of(copies)))
        if taken:
            halves.client.call("take", lane)
        scene.mover.half.call("cancel", scene.JOB)
        end = scene.end()
        assert (end.status, end.sums, end.wrong, end.word) == ("abandoned", [], [], FAILED)


# ---------------------------------------------------------------- a device that makes mistakes


class Mistake(NamedTuple):
    mode: str
    where: str
    """The process in which it happens."""
    operation: str
    """A stream's; of a kernel also its report."""
    action: int = CORRUPT
    jobs: tuple[str, ...] = ("store", "retrieve")


STORES = ("store",)
"""A kernel sums what it reads. What a scatter writes wrongly afterwards is outside a digest's way."""
MISTAKES = [
    Mistake("staged", "client", "run:kernel", jobs=STORES),
    Mistake("staged", "mover", "run:copy"),
    Mistake("server-gather", "mover", "run:kernel", jobs=STORES),
    Mistake("server-gather", "mover", "run:copy"),
    Mistake("direct with a ring", "mover", "run:copy"),
    Mistake("direct", "mover", "run:copy"),
    *(
        Mistake(mode, where, "run:report", action)
        for mode, where in (
            ("staged", "client"),
            ("server-gather", "mover"),
            ("direct with a ring", "client"),
            ("direct", "mover"),
        )
        for action in (CORRUPT, CODE)
    ),
]


@pytest.mark.parametrize(("mistake", "kind"), [(mistake, kind) for mistake in MISTAKES for kind in mistake.jobs])
def test_a_mistake_of_the_device_is_noticed(halves: Halves, mistake: Mistake, kind: str) -> None:
    """A copy or a kernel writes one wrong byte, into staging, the arena, or the report; or there is no report."""
    with Scene(halves, mistake.mode, "register", 6) as scene:
        pid = halves.client.pid if mistake.where == "client" else scene.mover.half.pid
        copies = scene.whole()
        for _ in range(SEGMENTS):  # each has a right report of these bytes then
            good = scene.store(copies)
            scene.retrieve(good)

        def mistaken(job: str, brought: list[CopyGroup]) -> list[int]:
            with halves.machine.rule(mistake.operation, mistake.action, code=1, pid=pid, times=1) as rule:
                end = scene.run(job, brought)
                assert rule.met(), "it happened"
            if job == "store" and end.status == "done":
                return end.sums
            assert (end.status, end.code) == ("failed", "digest")
            return []

        if kind == "retrieve":
            mistaken("retrieve", good)
        elif sums := mistaken("store", copies):
            wrong = [at for at, right in enumerate(scene.sums_of(copies)) if right != sums[at]]
            assert wrong
            scene.fails(with_sums(copies, sums), Planted(mistake.operation, wrong))
        for _ in range(SEGMENTS):
            scene.retrieve(scene.store(copies))


def test_digests_do_not_spoil_a_stream_capture(halves: Halves) -> None:
    with Scene(halves, "staged", "register", 6) as scene:
        halves.client.call("begin_capture")
        stored = scene.store()
        assert scene.run("retrieve", stored).status == "done"
        assert halves.client.call("end_capture") == 0
