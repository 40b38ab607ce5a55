"""The checks that authors of drivers run: ours and the examples pass them, and each finds the bug that it is for."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore

from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.contract import CHECKS, Check, problem_of, run
from kvserver.remote.objects.driver import Driver, Named, Start
from kvserver.remote.objects.plugin import PluggedIn
from kvserver.remote.secrets import CurrentSecret, SecretSource
from kvserver.remote.store import Facts, StoreError
from tests.rigs.s3_server import BUCKET, KEY, KEY_ID, S3Server, cloud_objects

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "stores"
NAMES = [check.__name__ for check in CHECKS]


@pytest.fixture(params=["memory", "local", "s3", "azure", "sqlite", "opendal"])
def opens(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Driver]:
    monkeypatch.syspath_prepend(EXAMPLES)
    match request.param:
        case "memory":
            memory = MemoryStore()
            return lambda: CloudObjects(Place("s3", "memory"), stand_in=memory)
        case "local":
            return lambda: CloudObjects(Place("s3", "local"), stand_in=LocalStore(str(tmp_path)))
        case "azure":
            azure = request.getfixturevalue("azure")
            return lambda: azure.objects(tmp_path.name)
        case "sqlite":
            options = {"path": str(tmp_path / "objects.db")}
            return lambda: PluggedIn("sqlite_store:SqliteStore", options, None)
    server: S3Server = request.getfixturevalue("s3")
    if request.param == "s3":
        return lambda: cloud_objects(server, tmp_path.name)
    pytest.importorskip("opendal", reason="the example over OpenDAL needs it: pip install opendal")
    options = {
        "scheme": "s3",
        "bucket": BUCKET,
        "root": f"/{tmp_path.name}",
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": KEY_ID,
        "password_as": "secret_access_key",
    }
    password = CurrentSecret(SecretSource(variable="KEY", environment={"KEY": KEY}))
    return lambda: PluggedIn("opendal_store:OpendalStore", options, password)


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_our_drivers_and_the_examples_do_what_the_contract_says(check: Check, opens: Callable[[], Driver]) -> None:
    assert problem_of(check, opens) == ""
    left = [one for some in opens().listed("kv1/", within_s=30) for one in some]
    assert left == [], "nothing is left of a check"


class Buggy(CloudObjects):
    """Objects in memory, right but for what a bug changes."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(Place("s3", "memory"), stand_in=memory)


class Shortens(Buggy):
    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        return super().create(name, pieces[:-1] or [b""], within_s=within_s)


class Unordered(Buggy):
    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        found = super().starts(names, most_bytes, within_s=within_s)
        return [one for one in found if one is not None] + [None] * found.count(None)


class SizeOfBeginning(Buggy):
    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        found = super().starts(names, most_bytes, within_s=within_s)
        return [Start(one.beginning, len(one.beginning)) if isinstance(one, Start) else one for one in found]


class Overwrites(Buggy):
    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        super().replace(name, b"".join(pieces), within_s=within_s)
        return True


class LooksFirst(Buggy):
    """Creates in two steps, between which another one may."""

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        if super().starts([name], 1, within_s=within_s) != [None]:
            return False
        time.sleep(0.05)
        super().replace(name, b"".join(pieces), within_s=within_s)
        return True


class ReplacesNothing(Buggy):
    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        super().create(name, [value], within_s=within_s)


class IgnoresOffsets(Buggy):
    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        return all(super(IgnoresOffsets, self).read(name, [(0, target)], within_s=within_s) for _, target in pieces)


class ReadsLess(Buggy):
    """Takes what there is."""

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        (start,) = super().starts([name], 1, within_s=within_s)
        if not isinstance(start, Start):
            return False
        there = [(offset, target[: max(0, start.bytes - offset)]) for offset, target in pieces]
        return super().read(name, [(offset, some) for offset, some in there if len(some)], within_s=within_s)


class ReadsPieceByPiece(Buggy):
    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        for piece in pieces:
            time.sleep(0.005)
            if not super().read(name, [piece], within_s=within_s):
                return False
        return True


class RemovesOne(Buggy):
    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        super().remove(names[:1], within_s=within_s)


class ListsMore(Buggy):
    """Takes "a/" for the beginning of "ab/"."""

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        folder = beginning.rstrip("/").rpartition("/")[0] + "/"
        for some in super().listed(folder, within_s=within_s):
            yield [one for one in some if one.name.startswith(beginning.rstrip("/"))]


class ListsOnePage(Buggy):
    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        for some in super().listed(beginning, within_s=within_s):
            yield some[:20]


class TimeStandsStill(Buggy):
    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        for some in super().listed(beginning, within_s=within_s):
            yield [one._replace(written_s=0.0) for one in some]


class TouchMakes(Buggy):
    def touch(self, name: str, *, within_s: float) -> None:
        super().create(name, [b""], within_s=within_s)


class CutsNames(Buggy):
    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        return super().create(name[:255], pieces, within_s=within_s)


class OneBuffer(Buggy):
    """Gathers into a buffer that all threads share."""

    shared = bytearray(1 << 22)

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        whole = b"".join(pieces)
        self.shared[: len(whole)] = whole
        time.sleep(0.001)
        return super().create(name, [bytes(self.shared[: len(whole)])], within_s=within_s)


class TakesItsTime(Buggy):
    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        if within_s < 1:
            time.sleep(5.5)
        return super().read(name, pieces, within_s=within_s)


class Anonymous(Buggy):
    def facts(self) -> Facts:
        return Facts("", "", None)


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (Shortens, "what_one_driver_writes_another_reads"),
        (Unordered, "beginnings_come_in_the_order_of_their_names"),
        (SizeOfBeginning, "beginnings_come_in_the_order_of_their_names"),
        (Overwrites, "a_second_creation_is_told_so_and_changes_nothing"),
        (LooksFirst, "of_many_creators_one_wins_with_all_its_bytes"),
        (ReplacesNothing, "an_object_is_replaced_whatever_is_there"),
        (IgnoresOffsets, "pieces_are_read_from_their_offsets"),
        (ReadsLess, "what_is_not_there_or_too_short_is_not_read"),
        (ReadsPieceByPiece, "no_reader_sees_two_writes_mixed"),
        (RemovesOne, "what_was_removed_is_not_there_and_may_be_created_again"),
        (ListsMore, "a_list_has_all_that_begins_so_and_nothing_else"),
        (ListsOnePage, "a_list_has_all_that_begins_so_and_nothing_else"),
        (TimeStandsStill, "a_list_tells_which_write_was_later"),
        (TouchMakes, "use_of_an_object_is_counted_also_if_it_is_gone"),
        (CutsNames, "all_names_of_the_contract_are_taken"),
        (OneBuffer, "many_threads_have_their_own_objects"),
        (TakesItsTime, "a_call_with_little_time_ends_soon"),
        (Anonymous, "what_the_store_is_can_be_told"),
    ],
)
def test_each_check_finds_the_bug_that_it_is_for(bug: type[Buggy], check: str) -> None:
    memory = MemoryStore()
    (named,) = (one for one in CHECKS if one.__name__ == check)
    assert problem_of(named, lambda: bug(memory)) != ""


class FailsOnThreads(Buggy):
    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("planted")
        return super().create(name, pieces, within_s=within_s)


class ReadsNothing(Buggy):
    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        raise KeyError("planted")


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (FailsOnThreads, "many_threads_have_their_own_objects"),
        (FailsOnThreads, "of_many_creators_one_wins_with_all_its_bytes"),
        (ReadsNothing, "no_reader_sees_two_writes_mixed"),
    ],
)
def test_whatever_a_driver_raises_breaks_a_check_that_leaves_no_thread_behind(bug: type[Buggy], check: str) -> None:
    memory = MemoryStore()
    (named,) = (one for one in CHECKS if one.__name__ == check)
    assert "planted" in problem_of(named, lambda: bug(memory))
    assert not [thread for thread in threading.enumerate() if thread.name.endswith(("(write)", "(alone)"))]


def test_every_check_has_such_a_bug_and_all_are_carried_out() -> None:
    marks = test_each_check_finds_the_bug_that_it_is_for.pytestmark  # type: ignore[attr-defined]
    assert {check for mark in marks for _, check in mark.args[1]} == set(NAMES)
    memory = MemoryStore()
    told = list(run(lambda: Overwrites(memory)))
    assert [name for name, _ in told] == [name.replace("_", " ") for name in NAMES]
    assert [problem for name, problem in told if name.startswith("a second creation")] == [
        "the second create: expected False"
    ]
