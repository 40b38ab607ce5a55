"""After a crash at any instant of a write, recovery finds no half-written record, and none that was given up.

Two kinds of crash. A *kill* ends the process: writes that had ended are there, on the device or in the page cache, and
any parts of those in flight. A *power cut* takes the page cache and everything that the device had not made durable. Of
all writes since the last flush, to either file, any parts may be missing, in any order. The images are made from the
trace of a run, for every instant of it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserver._native import DiskFaults, DiskStore
from tests.rigs.native_disk_rig import CHECKSUM, DONE, SEGMENT_BYTES, SIZES, Extent, Kind, Record, Rig, kept, open_store

UNIT = {"payloads": 512, "headers": 8}
"""Smallest part of a write that is there or not: sectors of payloads; words of a header, which the kernel copies."""
NAMES = {"payloads": DiskStore.FILE, "headers": DiskStore.HEADERS}
SEGMENTS = 2

Trace = list[tuple[str, int, str, int, bytes]]
Image = dict[str, bytearray]
"""Content by file."""


class Job(NamedTuple):
    """Records that were submitted together."""

    kind: Kind
    records: list[Record]
    flush: bool = False


class Run(NamedTuple):
    before: Image
    """Content before the first write."""
    trace: Trace
    jobs: list[Job]
    marks: list[int]
    """Length of the trace after each job."""


def conflicts(old: Extent, new: Extent) -> bool:
    """Whether writing `new` replaces the record in `old`."""
    if (old.device, old.segment) != (new.device, new.segment):
        return False
    return old.extent_bytes != new.extent_bytes or old.position == new.position


def image_of(directory: Path) -> Image:
    return {file: bytearray((directory / name).read_bytes()) for file, name in NAMES.items()}


def lay(directory: Path, image: Image) -> None:
    for file, name in NAMES.items():
        (directory / name).write_bytes(image[file])


def copy_of(image: Image) -> Image:
    return {file: bytearray(content) for file, content in image.items()}


def recorded(directory: Path, jobs: list[Job]) -> Run:
    for name in NAMES.values():
        (directory / name).unlink(missing_ok=True)
    open_store(directory, segments=SEGMENTS).close()
    before = image_of(directory)
    faults = DiskFaults()
    faults.record()
    store = open_store(directory, segments=SEGMENTS, faults=faults)
    rig = Rig(store, depth=2)
    marks = []
    for job in jobs:
        rig.run(job.kind, job.records)
        if job.flush:
            store.flush()
        marks.append(len(faults.trace()))
    rig.close()
    store.close()
    return Run(before, list(faults.trace()), jobs, marks)


def sure_and_gone(run: Run, instant: int, since: int = 0) -> tuple[set[Record], set[Record]]:
    """Records that must be found after a crash at that instant, and those that must not.

    All writes before `since` were durable. Jobs submitted after that may or may not have happened."""
    sure: set[Record] = set()
    gone: set[Record] = set()
    begun = 0
    for job, mark in zip(run.jobs, run.marks, strict=True):
        ended = mark <= (since or instant)
        for record in job.records if begun < instant else []:
            ends = {held for held in sure if conflicts(held.extent, record.extent)}
            sure -= ends
            if job.kind == "withdraw":
                gone |= {record} if ended else set()
            else:
                gone |= ends if ended else set()
                sure |= {record} if ended else set()
        begun = mark
    return sure, gone - sure


def in_part(chooser: random.Random, image: Image, file: str, offset: int, content: bytes) -> None:
    """Applies any parts of a write: none, some or all."""
    share = chooser.choice((0.0, 0.5, 1.0))
    unit = UNIT[file]
    for at in range(0, len(content), unit):
        if chooser.random() < share:
            image[file][offset + at : offset + at + unit] = content[at : at + unit]


def after_kill(run: Run, instant: int, chooser: random.Random) -> Image:
    image = copy_of(run.before)
    under_way: dict[int, tuple[str, int, bytes]] = {}
    for event, request, file, offset, content in run.trace[:instant]:
        if event == "begin":
            under_way[request] = (file, offset, content)
        elif event == "end":
            file, offset, content = under_way.pop(request)
            image[file][offset : offset + len(content)] = content
    for file, offset, content in under_way.values():
        in_part(chooser, image, file, offset, content)
    return image


def after_power_cut(run: Run, instant: int, chooser: random.Random) -> tuple[Image, int]:
    """(the image, the position of the last flush)."""
    flushed = max((at + 1 for at in range(instant) if run.trace[at][0] == "flush"), default=0)
    image = copy_of(run.before)
    for at, (event, _, file, offset, content) in enumerate(run.trace[:instant]):
        if event != "begin":
            continue
        if at < flushed:
            image[file][offset : offset + len(content)] = content
        else:
            in_part(chooser, image, file, offset, content)
    return image, flushed


def check(directory: Path, image: Image, run: Run, *, sure: set[Record], gone: set[Record], whole: bool) -> None:
    lay(directory, image)
    found = kept(directory, segments=SEGMENTS)  # compares the bytes of every record that reads as right
    written = {record for job in run.jobs if job.kind == "write" for record in job.records}
    assert set(found) <= written
    assert {record for record, outcome in found.items() if outcome == DONE} >= sure
    assert set(found.values()) <= ({DONE} if whole else {DONE, CHECKSUM})
    assert not gone & set(found)


def story(seed: int, length: int) -> list[Job]:
    """Jobs of up to four records; no two records of a job conflict, so that its order does not matter."""
    chooser = random.Random(seed)
    generation = 0
    held: set[Record] = set()
    jobs = []
    for _ in range(length):
        flush = chooser.random() < 0.3
        if held and chooser.random() < 0.2:
            victim = chooser.choice(sorted(held))
            held.remove(victim)
            jobs.append(Job("withdraw", [victim], flush))
            continue
        batch: list[Record] = []
        for _ in range(chooser.randrange(1, 5)):
            size = SIZES[chooser.random() < 0.3]
            position = chooser.randrange(DiskStore.extents_per_segment(SEGMENT_BYTES, size))
            extent = Extent(0, chooser.randrange(SEGMENTS), position, size)
            if not any(conflicts(record.extent, extent) for record in batch):
                generation += 1
                batch.append(Record(extent, generation))
        for record in batch:
            held = {other for other in held if not conflicts(other.extent, record.extent)} | {record}
        jobs.append(Job("write", batch, flush))
    return jobs


def instants(run: Run) -> Iterator[int]:
    yield from range(len(run.trace) + 1)


def test_a_kill_at_every_instant_leaves_whole_records_only(tmp_path: Path) -> None:
    run = recorded(tmp_path, story(seed=3, length=14))
    for instant in instants(run):
        sure, gone = sure_and_gone(run, instant)
        image = after_kill(run, instant, random.Random(instant))
        check(tmp_path, image, run, sure=sure, gone=gone, whole=True)


def test_a_power_cut_at_every_instant_gives_no_wrong_byte_and_keeps_what_was_flushed(tmp_path: Path) -> None:
    run = recorded(tmp_path, story(seed=4, length=14))
    for instant in instants(run):
        image, flushed = after_power_cut(run, instant, random.Random(instant))
        sure, _ = sure_and_gone(run, instant, since=flushed) if flushed else (set(), set())
        check(tmp_path, image, run, sure=sure, gone=set(), whole=False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), where=st.floats(0, 1), power=st.booleans())
def test_any_story_with_any_crash(tmp_path: Path, seed: int, where: float, power: bool) -> None:
    run = recorded(tmp_path, story(seed, length=seed % 17 + 1))
    instant = round(where * len(run.trace))
    chooser = random.Random(seed)
    if power:
        image, flushed = after_power_cut(run, instant, chooser)
        sure, _ = sure_and_gone(run, instant, since=flushed) if flushed else (set(), set())
        check(tmp_path, image, run, sure=sure, gone=set(), whole=False)
    else:
        sure, gone = sure_and_gone(run, instant)
        check(tmp_path, after_kill(run, instant, chooser), run, sure=sure, gone=gone, whole=True)


def test_a_store_goes_on_after_every_crash_of_it(tmp_path: Path) -> None:
    """Crashes the same store repeatedly; each recovery finds what the earlier ones left."""
    chooser = random.Random(9)
    generation = 1000
    held: set[Record] = set()
    open_store(tmp_path, segments=SEGMENTS).close()
    for _ in range(40):
        before = image_of(tmp_path)
        faults = DiskFaults()
        faults.record()
        store = open_store(tmp_path, segments=SEGMENTS, faults=faults)
        store.recover()
        rig = Rig(store, depth=2)
        size = SIZES[chooser.random() < 0.2]
        per_segment = DiskStore.extents_per_segment(SEGMENT_BYTES, size)
        batch = []
        for position in chooser.sample(range(per_segment), 2):
            generation += 1
            batch.append(Record(Extent(0, chooser.randrange(SEGMENTS), position, size), generation))
        assert rig.run("write", batch) == [DONE, DONE]
        rig.close()
        store.close()
        run = Run(before, list(faults.trace()), [Job("write", batch)], [len(faults.trace())])
        instant = chooser.randrange(len(run.trace) + 1)
        lay(tmp_path, after_kill(run, instant, chooser))
        found = kept(tmp_path, segments=SEGMENTS)
        assert set(found.values()) <= {DONE}
        untouched = {old for old in held if not any(conflicts(old.extent, new.extent) for new in batch)}
        assert untouched <= set(found) <= held | set(batch)
        held = set(found)
