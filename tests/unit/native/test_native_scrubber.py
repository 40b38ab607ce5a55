"""The scrubber: what changed in the arena is wrong, what nobody summed is not compared, and nothing waits for it."""

import os
import random
import select
import time
from collections.abc import Iterator, Sequence

import pytest

from kvserver.tiers.records import NO_PARENT, NO_SUM, SCRUB_ITEM, Record, names_hash, pack
from kvserver.transfer.native import SLOT_ALIGN, Ledger, Scrubber, create_memfd, digest_sum

SLOTS = 9
SLOT_BYTES = 1 << 20
ARENA_BYTES = SLOTS * SLOT_BYTES
NAMESPACE = bytes(range(32))
SIZES = (1, 3, 4095, 4096, 4097, 65_537, (256 << 10) - 1, (256 << 10) + 1, SLOT_BYTES)
"""One byte, words and rows that are not whole, and the ends of the pieces in which a slot is read."""


class Scene:
    """An arena with a payload of each size, a ledger, and a scrubber that reads them."""

    def __init__(self) -> None:
        self.arena = create_memfd("arena", ARENA_BYTES)
        self.ledger_fd = create_memfd("ledger", Ledger.file_bytes(ARENA_BYTES))
        self.ledger = Ledger(self.ledger_fd, ARENA_BYTES)
        self.scrubber = Scrubber(self.arena, ARENA_BYTES, self.ledger_fd, ARENA_BYTES)

    def fill(self, unsummed: Sequence[int] = ()) -> None:
        for place, size in enumerate(SIZES):
            payload = random.Random(place).randbytes(size)
            os.pwrite(self.arena, payload, place * SLOT_BYTES)
            payload_sum = NO_SUM if place in unsummed else digest_sum(payload, 0, size, 0)[0]
            shape = 2, place, size, 0, SLOT_BYTES, 1
            self.ledger.seal(pack(Record(place * SLOT_BYTES, NAMESPACE, key(place), NO_PARENT, *shape, payload_sum)))

    def flip(self, at: int, bit: int = 1) -> None:
        (byte,) = os.pread(self.arena, 1, at)
        os.pwrite(self.arena, bytes([byte ^ bit]), at)

    def verify(self, items: bytes, job: int = 5) -> tuple[list[int], int]:
        self.scrubber.submit(job, items)
        (end,) = self.ends(1)
        assert end[0] == job
        return end[1], end[2]

    def ends(self, count: int) -> list[tuple[int, list[int], int]]:
        found: list[tuple[int, list[int], int]] = []
        while len(found) < count:
            assert select.select([self.scrubber.eventfd], [], [], 20)[0], "it ends"
            os.eventfd_read(self.scrubber.eventfd)
            found += self.scrubber.ends(1)
        return found

    def close(self) -> None:
        self.scrubber.close()
        self.ledger.close()
        os.close(self.arena)
        os.close(self.ledger_fd)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def key(place: int) -> bytes:
    return bytes([place + 1]) * 32


def item(place: int, *, size: int = 0, named: int | None = None) -> bytes:
    names = names_hash(NAMESPACE, 2, place, [key(place if named is None else named)])
    return SCRUB_ITEM.pack(place * SLOT_BYTES, size or SIZES[place], names)


def items(places: Sequence[int] = range(SLOTS)) -> bytes:
    return b"".join(item(place) for place in places)


def test_items_are_packed_as_documented() -> None:
    assert SCRUB_ITEM.size == Scrubber.ITEM_BYTES == 24


def test_what_is_as_it_was_stored_is_right(scene: Scene) -> None:
    scene.fill()
    assert scene.verify(items()) == ([], sum(SIZES))
    assert scene.verify(b"") == ([], 0)


@pytest.mark.parametrize("place", range(SLOTS))
def test_one_flipped_bit_is_wrong(scene: Scene, place: int) -> None:
    scene.fill()
    for at in {0, SIZES[place] // 2, SIZES[place] - 1}:
        for bit in (1, 128):
            scene.flip(place * SLOT_BYTES + at, bit)
            assert scene.verify(items()) == ([place], sum(SIZES)), (at, bit)
            scene.flip(place * SLOT_BYTES + at, bit)
    assert scene.verify(items()) == ([], sum(SIZES))


def test_bytes_behind_a_payload_do_not_count(scene: Scene) -> None:
    scene.fill()
    for place, size in enumerate(SIZES[:-1]):
        scene.flip(place * SLOT_BYTES + size)
    assert scene.verify(items()) == ([], sum(SIZES))


def test_wrong_items_are_numbered_in_the_order_of_the_job(scene: Scene) -> None:
    scene.fill()
    for place in (0, 4, 8):
        scene.flip(place * SLOT_BYTES)
    assert scene.verify(items((8, 1, 4, 2, 0)))[0] == [0, 2, 4]


def test_what_nobody_summed_is_not_compared(scene: Scene) -> None:
    scene.fill(unsummed=(2, 7))
    scene.flip(2 * SLOT_BYTES)
    scene.flip(3 * SLOT_BYTES)
    assert scene.verify(items()) == ([3], sum(SIZES) - SIZES[2] - SIZES[7])


def test_a_slot_with_another_name_is_wrong(scene: Scene) -> None:
    scene.fill()
    assert scene.verify(item(1) + item(2, named=3) + item(4)) == ([1], SIZES[1] + SIZES[4])


def test_another_length_than_the_ledger_says_is_wrong(scene: Scene) -> None:
    scene.fill()
    assert scene.verify(item(5, size=SIZES[5] - 1) + item(5))[0] == [0]


def test_what_cannot_be_read_is_wrong() -> None:
    """A file that became shorter is a read that failed; over a mapping it would be SIGBUS."""
    scene = Scene()
    scene.fill()
    shorter = create_memfd("arena", ARENA_BYTES, sealed=False)
    os.pwrite(shorter, os.pread(scene.arena, ARENA_BYTES, 0), 0)
    scene.scrubber.close()
    scene.scrubber = Scrubber(shorter, ARENA_BYTES, scene.ledger_fd, ARENA_BYTES)
    os.ftruncate(shorter, 8 * SLOT_BYTES + 300_000)
    assert scene.verify(items()) == ([8], sum(SIZES[:8]) + 300_000)
    scene.close()
    os.close(shorter)


def test_many_jobs_end_in_their_order(scene: Scene) -> None:
    scene.fill()
    for job in range(40):
        scene.scrubber.submit(job, items((job % SLOTS,)))
    assert [job for job, _, _ in scene.ends(40)] == list(range(40))


def test_its_thread_has_the_lowest_priority_and_a_name(scene: Scene) -> None:
    scene.fill()
    scene.verify(items())
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    names = {task: open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks}  # noqa: SIM115
    (reader,) = [task for task, name in names.items() if name == "kv-scrub"]
    assert os.getpriority(os.PRIO_PROCESS, reader) == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19, "the loop's thread keeps its own"


def test_it_is_closed_while_it_is_busy(scene: Scene) -> None:
    scene.fill()
    everything = items() * 100
    for job in range(100):
        scene.scrubber.submit(job, everything)
    began_s = time.monotonic()
    scene.scrubber.close()
    assert time.monotonic() - began_s < 5, "20 GB are not read before it ends"
    with pytest.raises(ValueError, match="closed"):
        scene.scrubber.submit(1, items())
    scene.scrubber.close()


@pytest.mark.parametrize(
    ("slot", "size"),
    [(-SLOT_ALIGN, 1), (1, 1), (ARENA_BYTES, 1), (0, ARENA_BYTES + 1), (0, 0), (ARENA_BYTES - SLOT_ALIGN, 4097)],
)
def test_items_outside_the_arena_are_refused(scene: Scene, slot: int, size: int) -> None:
    scene.fill()
    with pytest.raises(ValueError, match="slot"):
        scene.scrubber.submit(1, item(0) + SCRUB_ITEM.pack(slot, size, bytes(8)))
    assert scene.verify(items()) == ([], sum(SIZES)), "nothing of it was begun"


def test_packed_items_have_whole_sizes(scene: Scene) -> None:
    with pytest.raises(ValueError, match="items"):
        scene.scrubber.submit(1, bytes(25))


def test_an_arena_that_is_shorter_than_said_is_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match="arena_bytes"):
        Scrubber(scene.arena, ARENA_BYTES + SLOT_ALIGN, scene.ledger_fd, ARENA_BYTES)
