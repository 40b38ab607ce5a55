"""Jobs that wait for an event of the engine: they begin when it is done, and not before."""

from collections.abc import Iterator

import pytest

from kvclient import Blocks, Client, RequestError
from tests.device.conftest import DeviceServer
from tests.device.engine_process import DeviceWorker
from tests.device.simulated import CODE, HANG, Machine
from tests.process.engine import SMALL, Engine
from tests.process.harness import until

NOT_READY, FAILED_LAUNCH = 600, 719


@pytest.fixture
def worker(server: DeviceServer, machine: Machine) -> Iterator[DeviceWorker]:
    with DeviceWorker(server.path, machine) as made:
        made.call("open", "kv_first")
        made.call("ready")
        yield made


def test_a_store_waits_for_its_event(worker: DeviceWorker, server: DeviceServer, machine: Machine) -> None:
    with machine.rule("event_query", HANG, pid=worker.pid) as rule:
        worker.call("begin_store", 1, 3, None, True)
        until("the event to be looked at", rule.met)
        assert not worker.call("is_done")
        assert server.status().counters["stores"] == 0
    outcome = worker.call("outcome")
    assert (outcome["chunks"], outcome["why"]) == (3, "")
    assert worker.call("retrieve", 1, 3) == 3


def test_the_timeout_counts_from_the_call(worker: DeviceWorker, server: DeviceServer, machine: Machine) -> None:
    with machine.rule("event_query", HANG, pid=worker.pid):
        worker.call("begin_store", 1, 3, 0.05, True)
        assert worker.call("outcome")["why"] == "timeout"
    assert server.status().counters["stores"] == 0
    assert worker.call("store", 2, 3)["chunks"] == 3  # the late event has no effect any more


def test_an_event_that_failed_ends_the_job(worker: DeviceWorker, server: DeviceServer, machine: Machine) -> None:
    with machine.rule("event_query", CODE, code=FAILED_LAUNCH, pid=worker.pid, times=1):
        worker.call("begin_store", 1, 3, None, True)
        assert worker.call("outcome")["why"] == "device-error"
    assert server.status().counters["stores"] == 0


def test_a_store_whose_event_is_not_done_ends_with_its_cache(worker: DeviceWorker, machine: Machine) -> None:
    with machine.rule("event_query", CODE, code=NOT_READY, pid=worker.pid) as rule:
        worker.call("begin_store", 1, 3, None, True)
        until("the event to be looked at", rule.met)
        worker.call("move_to_twin")
        assert worker.call("outcome")["why"] == "closed"
    assert worker.call("store", 2, 3)["chunks"] == 3


def test_a_cache_that_has_waited_for_events_is_unregistered_whole(worker: DeviceWorker) -> None:
    """The number of its event descriptor is soon reused."""
    worker.call("begin_store", 1, 3, None, True)
    assert worker.call("outcome")["chunks"] == 3
    worker.call("move_to_twin")
    assert worker.call("signal_new_descriptors", 9) == 0
    assert worker.call("retrieve", 1, 3) == 3


def test_what_is_no_event_is_refused(server: DeviceServer) -> None:
    with Engine(server.path, SMALL) as engine:
        engine.ready()
        client: Client = engine.client
        with pytest.raises(RequestError, match=r"after: cache 'kv' is on the host, where there are no events"):
            client.store(engine.cache, 0, b"", bytes(32), [Blocks(0, 0, [0])], after=1)
