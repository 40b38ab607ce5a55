"""The duties of a driver, as checks that its author runs: `kvserver remote contract`, or run() in tests of the author.

Each check has a folder of its own in the store, drawn at random, and nothing is left of it. The name of a check says
what must hold.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kvserver.remote.objects.driver import Driver, Start
from kvserver.remote.objects.store import TRIAL
from kvserver.remote.secrets import safe_text
from kvserver.remote.store import StoreError

WITHIN_S = 30.0
"""No busy machine and no slow store passes it."""
SIZES = (1, 4099, 3_000_017)
WRITERS = 6
MIXED_TURNS = 40
LISTED = 37
SHORT_S, SOON_S = 0.001, 5.0
LONG_NAME_CHARS = 300
Opener = Callable[[], Driver]
Check = Callable[["Place"], None]


class Broken(Exception):
    """A driver does not do what the contract says."""


class Place:
    """A folder of a store, and drivers that were opened for it."""

    def __init__(self, opens: Opener) -> None:
        self.folder = f"{TRIAL}/{secrets.token_hex(8)}/"
        self._opens = opens
        self._opened: list[Driver] = []

    def driver(self) -> Driver:
        """Another driver of the same store, as another server has one."""
        self._opened.append(self._opens())
        return self._opened[-1]

    def start(self, driver: Driver, name: str, most_bytes: int = 1 << 20) -> Start | None:
        (found,) = driver.starts([self.folder + name], most_bytes, within_s=WITHIN_S)
        if isinstance(found, StoreError):
            raise found
        return found

    def content(self, driver: Driver, name: str, size: int) -> bytes | None:
        """All bytes of an object of that size; None if it cannot be read."""
        came = memoryview(bytearray(size))
        is_there = driver.read(self.folder + name, [(0, came)], within_s=WITHIN_S)
        return bytes(came) if is_there else None

    def create(self, driver: Driver, name: str, *pieces: bytes | memoryview) -> bool:
        return driver.create(self.folder + name, pieces, within_s=WITHIN_S)

    def replace(self, driver: Driver, name: str, value: bytes) -> None:
        driver.replace(self.folder + name, value, within_s=WITHIN_S)

    def listed(self, driver: Driver, beginning: str = "") -> list[tuple[str, int]]:
        """Names behind the folder's own, and sizes, in order."""
        lists = driver.listed(self.folder + beginning, within_s=WITHIN_S)
        return sorted((one.name.removeprefix(self.folder), one.bytes) for some in lists for one in some)

    def leave(self) -> None:
        """Removes what is left, and closes."""
        if self._opened:
            left = [self.folder + name for name, _ in self.listed(self._opened[0])]
            if left:
                self._opened[0].remove(left, within_s=WITHIN_S)
        for driver in self._opened:
            driver.close()


def run(opens: Opener) -> Iterator[tuple[str, str]]:
    """Carries out all checks. For each its name in words, and what was wrong; empty if nothing was."""
    for check in CHECKS:
        yield check.__name__.replace("_", " "), problem_of(check, opens)


def problem_of(check: Check, opens: Opener) -> str:
    """The fault that a check has found; empty if none."""
    place = Place(opens)
    problem = ""
    try:
        check(place)
    except Exception as found:  # of a driver that somebody else has written
        problem = _said(found)
    try:
        place.leave()
    except Exception as found:  # of that driver, as above
        problem = problem or f"nothing could be removed: {_said(found)}"
    return problem


# -------------------------------------------------------------------- checks


def what_one_driver_writes_another_reads(place: Place) -> None:
    one, other = place.driver(), place.driver()
    for size in SIZES:
        value = _bytes_of(size)
        view = memoryview(bytearray(value))
        cut = size // 3
        _expect(place.create(one, f"s{size}", value[:1], view[1:cut], view[cut:]), "True", f"create of {size} bytes")
        view[:] = bytes(size)
        _expect(place.content(other, f"s{size}", size) == value, "the bytes that were written", f"read of {size}")


def beginnings_come_in_the_order_of_their_names(place: Place) -> None:
    driver = place.driver()
    for size in SIZES:
        place.create(driver, f"s{size}", _bytes_of(size))
    place.replace(driver, "empty", b"")
    names = ["s1", "none", "s3000017", "empty", "s4099", "none/s1"]
    found = driver.starts([place.folder + name for name in names], 512, within_s=WITHIN_S)
    for name, start in zip(names, found, strict=True):
        value = b"" if name == "empty" else _bytes_of(int(name[1:])) if name[1:].isdecimal() else None
        if value is None or not isinstance(start, Start):
            _expect(value is None and start is None, "a Start, or None if it is not there", f"starts of {name}", start)
            continue
        _expect(start.bytes == len(value), str(len(value)), f"the size of {name}", start.bytes)
        _expect(bytes(start.beginning) == value[:512], "its first 512 bytes", f"starts of {name}")
    _expect(driver.starts([], 512, within_s=WITHIN_S) == [], "an empty list", "starts of no names")


def a_second_creation_is_told_so_and_changes_nothing(place: Place) -> None:
    one, other = place.driver(), place.driver()
    _expect(place.create(one, "a/b", b"first") is True, "True", "the first create")
    _expect(place.create(other, "a/b", b"second") is False, "False", "the second create")
    _expect(place.create(one, "a/b", b"third") is False, "False", "the third create")
    _expect(place.content(one, "a/b", 5) == b"first", "the first one's bytes", "read")


def of_many_creators_one_wins_with_all_its_bytes(place: Place) -> None:
    values = [bytes([number]) * 70_001 for number in range(WRITERS)]
    won: list[int] = []
    _at_once(place, lambda number, driver: won.append(number) if place.create(driver, "won", values[number]) else None)
    _expect(len(won) == 1, "one winner", "create by many at once", len(won))
    came = place.content(place.driver(), "won", 70_001)
    _expect(came == values[won[0]], "the winner's bytes", "read")


def an_object_is_replaced_whatever_is_there(place: Place) -> None:
    one, other = place.driver(), place.driver()
    for value in (b"first", b"a longer second", b"3rd"):
        place.replace(one, "note", value)
        start = place.start(other, "note")
        came = None if start is None else bytes(start.beginning)
        _expect(came == value, repr(value), "starts after replace", came)


def pieces_are_read_from_their_offsets(place: Place) -> None:
    driver, value = place.driver(), _bytes_of(3_000_017)
    place.create(driver, "large", value)
    spans = [(0, 168), (168, 1), (5_003, 4_099), (2_900_001, 100_016)]
    pieces = [(offset, memoryview(bytearray(size))) for offset, size in spans]
    _expect(driver.read(place.folder + "large", pieces, within_s=WITHIN_S) is True, "True", "read of pieces")
    for offset, came in pieces:
        _expect(came == value[offset : offset + len(came)], "the bytes at their offset", f"read from {offset}")


def what_is_not_there_or_too_short_is_not_read(place: Place) -> None:
    driver = place.driver()
    place.create(driver, "short", b"seven b")
    for name, size in (("none", 1), ("short", 8)):
        _expect(place.content(driver, name, size) is None, "False", f"read of {size} bytes of {name!r}")
    beyond = [(9, memoryview(bytearray(3)))]
    _expect(driver.read(place.folder + "short", beyond, within_s=WITHIN_S) is False, "False", "read beyond the end")
    _expect(place.start(driver, "none") is None, "None", "starts of an object that is not there")


def no_reader_sees_two_writes_mixed(place: Place) -> None:
    writer, reader, size = place.driver(), place.driver(), 1_500_007
    values = [bytes([number]) * size for number in range(WRITERS)]
    place.replace(writer, "mixed", values[0])
    is_over = threading.Event()
    failed: list[Exception] = []

    def write() -> None:
        try:
            while not is_over.is_set():
                for value in values:
                    place.replace(writer, "mixed", value)
        except Exception as problem:  # the check raises it
            failed.append(problem)

    thread = threading.Thread(target=write)
    thread.start()
    mixed = 0
    try:
        for _ in range(MIXED_TURNS):
            pieces = [(offset, memoryview(bytearray(5))) for offset in (0, 700_001, size - 5)]
            if reader.read(place.folder + "mixed", pieces, within_s=WITHIN_S):
                mixed += len({bytes(came) for _, came in pieces}) > 1
    finally:
        is_over.set()
        thread.join()
    if failed:
        raise failed[0]
    _expect(not mixed, "one write's bytes, or False", "read while the object is replaced", f"{mixed} mixtures")


def what_was_removed_is_not_there_and_may_be_created_again(place: Place) -> None:
    driver, other = place.driver(), place.driver()
    names = [f"k/{number}" for number in range(7)]
    for name in names:
        place.create(driver, name, b"old")
    driver.remove([place.folder + name for name in (*names[:3], "none", *names[3:6])], within_s=WITHIN_S)
    driver.remove([place.folder + "none"], within_s=WITHIN_S)
    driver.remove([], within_s=WITHIN_S)
    left = [name for name in names if place.start(other, name) is not None]
    _expect(left == names[6:], f"{names[6:]}", "what is there after remove", left)
    _expect(place.create(other, names[0], b"newer") is True, "True", "create of what was removed")
    _expect(place.content(driver, names[0], 5) == b"newer", "the newer bytes", "read")


def a_list_has_all_that_begins_so_and_nothing_else(place: Place) -> None:
    driver = place.driver()
    _expect(place.listed(place.driver()) == [], "nothing", "the list of an empty folder")
    names = [f"a/{number % 5}/{number}" for number in range(LISTED)]
    for number, name in enumerate(names):
        place.create(driver, name, bytes(number + 1))
    for name in ("ab/1", "a.b", "b/a/1"):
        place.create(driver, name, b"1")
    expected = sorted((name, number + 1) for number, name in enumerate(names))
    found = place.listed(place.driver(), "a/")
    _expect(found == expected, f"{len(expected)} names with their sizes", "the list of a/", found[:3])
    _expect(len(place.listed(driver)) == LISTED + 3, str(LISTED + 3), "names in all", len(place.listed(driver)))


def a_list_tells_which_write_was_later(place: Place) -> None:
    driver = place.driver()
    place.create(driver, "earlier", b"1")
    time.sleep(1.1)  # some stores tell whole seconds
    place.create(driver, "later", b"1")
    lists = driver.listed(place.folder, within_s=WITHIN_S)
    when = {one.name.removeprefix(place.folder): one.written_s for some in lists for one in some}
    told = when.get("later", 0) - when.get("earlier", 0)
    _expect(0 < told < 3600, "a later time", "written_s of a later write", f"{told:g} s later")


def use_of_an_object_is_counted_also_if_it_is_gone(place: Place) -> None:
    driver = place.driver()
    place.create(driver, "used", b"used")
    for name in ("used", "none"):
        driver.touch(place.folder + name, within_s=WITHIN_S)
    _expect(place.content(driver, "used", 4) == b"used", "the same bytes", "read after touch")
    _expect(place.start(driver, "none") is None, "None", "starts of what was touched and is not there")


def all_names_of_the_contract_are_taken(place: Place) -> None:
    driver = place.driver()
    letters = "abcdefghijklmnopqrstuvwxyz0123456789._-"
    piece = "-/" + "x" * 60 + "/"
    names = [letters, f"-/{letters}", f"{letters[::-1]}/0"]
    names.append((piece * 9)[: LONG_NAME_CHARS - len(place.folder) - 1] + "z")
    for number, name in enumerate(names):
        _expect(place.create(driver, name, bytes([number])) is True, "True", f"create of {name!r}")
    for number, name in enumerate(names):
        _expect(place.content(driver, name, 1) == bytes([number]), "its byte", f"read of {name!r}")
    _expect(place.listed(driver) == sorted((name, 1) for name in names), "all of them", "their list")


def many_threads_have_their_own_objects(place: Place) -> None:
    driver = place.driver()
    wrong: list[str] = []

    def live(number: int, _: Driver) -> None:
        dice = random.Random(number)
        for turn in range(12):
            value, name = dice.randbytes(dice.randrange(1, 30_000)), f"{number}/{turn}"
            if not place.create(driver, name, value) or place.content(driver, name, len(value)) != value:
                wrong.append(name)

    _at_once(place, live)
    _expect(not wrong, "their own bytes", "reads by many threads", wrong)


def a_call_with_little_time_ends_soon(place: Place) -> None:
    driver, value = place.driver(), _bytes_of(3_000_017)
    place.create(driver, "large", value)
    begin_s = time.monotonic()
    came = memoryview(bytearray(len(value)))
    with suppress(StoreError):
        is_read = driver.read(place.folder + "large", [(0, came)], within_s=SHORT_S)
        _expect(not is_read or came == value, "all bytes, False or an error", "read with little time")
    took_s = time.monotonic() - begin_s
    _expect(took_s < SOON_S, f"an end within {SOON_S:g} s", f"a read within {SHORT_S:g} s", f"{took_s:.1f} s")


def what_the_store_is_can_be_told(place: Place) -> None:
    facts = place.driver().facts()
    _expect(bool(facts.kind and facts.version), "a kind and a version", "facts", facts)


CHECKS: Sequence[Check] = (
    what_one_driver_writes_another_reads,
    beginnings_come_in_the_order_of_their_names,
    a_second_creation_is_told_so_and_changes_nothing,
    of_many_creators_one_wins_with_all_its_bytes,
    an_object_is_replaced_whatever_is_there,
    pieces_are_read_from_their_offsets,
    what_is_not_there_or_too_short_is_not_read,
    no_reader_sees_two_writes_mixed,
    what_was_removed_is_not_there_and_may_be_created_again,
    a_list_has_all_that_begins_so_and_nothing_else,
    a_list_tells_which_write_was_later,
    use_of_an_object_is_counted_also_if_it_is_gone,
    all_names_of_the_contract_are_taken,
    many_threads_have_their_own_objects,
    a_call_with_little_time_ends_soon,
    what_the_store_is_can_be_told,
)


def _said(found: Exception) -> str:
    return str(found) if isinstance(found, Broken | StoreError) else f"{type(found).__name__}: {safe_text(found)}"


def _expect(is_right: bool, expected: str, of: str, came: object = None) -> None:
    if not is_right:
        raise Broken(f"{of}: expected {expected}" + ("" if came is None else f", got {came}"))


def _bytes_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _at_once(place: Place, act: Callable[[int, Driver], object]) -> None:
    """Does this with several drivers at the same time. Raises what one of them has raised."""
    drivers = [place.driver() for _ in range(WRITERS)]
    begin = threading.Barrier(WRITERS)
    failed: list[Exception] = []

    def alone(number: int) -> None:
        begin.wait()
        try:
            act(number, drivers[number])
        except Exception as problem:  # whatever a driver raises breaks the contract
            failed.append(problem)

    threads = [threading.Thread(target=alone, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
