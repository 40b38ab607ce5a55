"""What status says of a remote store, and what it warns of."""

import pytest
from msgspec.structs import replace

from kvserver.config.remotes import parse
from kvserver.service.base.events import MoverGone, Reported, Tick
from kvserver.service.report import problems
from kvserver.service.telling.counters import Counters
from kvserver.wire.orders import WARNING_FACT, Ready, RemoteIs, StartMover
from kvserver.wire.status import RemoteStatus, Status
from tests.rigs.brain_rig import Rig
from tests.rigs.remote_rig import RemoteRig

FINE = RemoteStatus(
    name="fleet",
    url="valkey://10.0.0.7",
    usable=True,
    namespaces=3,
    namespaces_known=3,
    namespaces_heard=3,
    looked_for=0,
    queued_chunks=0,
    reading_bytes=0,
    writing_bytes=0,
    read_bytes_per_s=0.0,
    clears_owed=0,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": "no such directory", "usable": False}, "the remote store fleet is not used: no such directory"),
        ({"usable": False}, "the remote store fleet is not used: its mover does not run"),
        ({"nodes_left_alone": ["a:1", "b:2"]}, "the remote store fleet does not answer at a:1, b:2"),
        ({"namespaces_known": 2}, "the remote store fleet has not told which chunks count, in some namespaces"),
        (
            {"namespaces_heard": 2},
            "announcements in the remote store fleet are not read, so it is asked for all that is missing",
        ),
        ({"clears_owed": 5}, "5 clears are not known to the remote store yet: other servers may have those chunks"),
    ],
)
def test_a_warning_says_what_is_wrong_with_the_store(changes: dict[str, object], said: str) -> None:
    assert list(problems.of_remotes([replace(FINE, **changes)])) == [said]


def test_a_store_that_works_is_no_warning_and_neither_is_none() -> None:
    assert list(problems.of_remotes([FINE])) == list(problems.of_remotes([])) == []


def test_status_follows_the_mover_of_the_store() -> None:
    rig = Rig(remotes=parse("fleet=file:///mnt/kv"))

    def status() -> RemoteStatus:
        document: Status = rig.service.status(rig.now_ns)
        assert document.remote is not None
        return document.remote

    assert (status().name, status().url, status().usable) == ("fleet", "file:///mnt/kv", False)
    wishes = [effect.wish for effect in rig.service.handle(Tick(), rig.now_ns) if hasattr(effect, "wish")]
    (mover,) = [wish.mover for wish in wishes if isinstance(wish, StartMover) and wish.device == "remote"]
    rig.service.handle(Reported(mover, Ready(1, "file", [])), rig.now_ns)
    assert status().usable
    rig.service.handle(Reported(mover, RemoteIs("it is not mounted", [])), rig.now_ns)
    assert (status().usable, status().problem) == (False, "it is not mounted")
    rig.service.handle(Reported(mover, RemoteIs("", ["n:1"])), rig.now_ns)
    assert (status().usable, status().nodes_left_alone) == (True, ["n:1"])
    rig.service.handle(MoverGone(mover, "signal 9"), rig.now_ns)
    assert not status().usable


def test_what_a_store_tells_late_is_shown_and_warned_of() -> None:
    rig = RemoteRig()
    for version in ("8.0", "8.1"):
        facts = [("version", version), (f"1 {WARNING_FACT}", "it is never emptied")]
        rig.report(rig.mover, Ready(1, "valkey", facts))
        status = rig.service.status(rig.now_ns)
        (shown,) = (mover for mover in status.movers if mover.device.startswith("remote"))
        assert (shown.facts["version"], shown.backend, shown.state) == (version, "valkey", "ready")
        assert any("it is never emptied" in warning for warning in status.warnings)


def test_failures_are_a_trouble_and_what_passes_by_itself_is_none() -> None:
    counters = Counters()
    for fault in ("remote-full", "digest", *problems.PASSING):
        counters.remote_failed("read", fault)
    counters.remote_failed("note", "remote-denied")  # no chunk, and a warning as long as it lasts
    counters.add("remote_dropped")
    assert problems.troubles(counters, []) == {
        "chunks that the remote store did not give or take": 2,
        "prefixes not written whole to the remote store: too many chunks waited": 1,
    }
