"""The client's part of the GPU path alone: exports and refusals, staging, events, capture and fork."""

import re
from collections.abc import Iterator

import pytest

from tests.device.client_process import (
    BLOCKS,
    DONE,
    FAULT,
    MIB,
    PAGE,
    RETRIEVE,
    STORE,
    TAKEN,
    ClientHalf,
)
from tests.device.simulated import CODE, HANG, STICKY, Machine, Vendor
from tests.process.harness import until

RUN = (0, 0, 1, 0, PAGE, PAGE)
ILLEGAL_ADDRESS = 700


@pytest.fixture
def client(machine: Machine) -> Iterator[ClientHalf]:
    half = ClientHalf(machine)
    yield half
    half.close()


# ---------------------------------------------------------------- export


def test_tensors_in_one_allocation_are_one_buffer(client: ClientHalf) -> None:
    """The server sees allocations, so offsets become relative to the allocation's start."""
    size = BLOCKS * PAGE
    one, other = client.call("take", 3 * size), client.call("take", size)
    runs = [(0, 3, 1, 0, PAGE - 1, PAGE - 1), (1, 0, 1, 0, PAGE, PAGE), (2, 0, 1, 0, PAGE, PAGE)]
    buffers = [(one + 100, size), (other, size), (one + 100 + size, size)]
    device_id, sizes, places = client.call("make", buffers, runs, {"mode": "direct"})
    assert len(device_id.split("@")[0]) == 32
    assert sizes == [3 * size, size]
    assert places == [(0, 103), (1, 0), (0, 100 + size)]


def test_an_allocation_has_one_handle_wherever_a_cache_begins(client: ClientHalf) -> None:
    """AMD's handles differ for every pointer, but all open at the start of the allocation."""
    address = client.call("take", 4 * BLOCKS * PAGE)
    one, other = (client.call("handle", address + at, BLOCKS * PAGE) for at in (0, 3 * PAGE + 7))
    assert one == other


def test_memory_that_cannot_be_shared_is_refused_naming_the_setting(client: ClientHalf, vendor: Vendor) -> None:
    address = client.call("take", 4 * MIB, "alloc_vmm")
    code, message = client.call("make", [(address, 4 * MIB)], [RUN], {})
    assert code == "not-exportable"
    name = "PYTORCH_CUDA_ALLOC_CONF" if vendor == "cuda" else "PYTORCH_HIP_ALLOC_CONF"
    assert f"set {name}=expandable_segments:False" in message
    assert '"device": "portable"' in message


def test_a_tensor_that_leaves_its_allocation_is_refused(client: ClientHalf) -> None:
    address = client.call("take", BLOCKS * PAGE)
    code, message = client.call("make", [(address + 1, BLOCKS * PAGE)], [RUN], {})
    assert code == "range"
    assert f"{BLOCKS * PAGE} bytes at {address + 1:#x} leave their allocation of {BLOCKS * PAGE} bytes" in message


def test_pages_that_leave_their_tensor_are_refused(client: ClientHalf) -> None:
    """The pages are inside the allocation, so no other check would notice."""
    address = client.call("take", 2 * BLOCKS * PAGE)
    code, message = client.call("make", [(address, BLOCKS * PAGE - 1)], [RUN], {})
    assert (code, f"which has {BLOCKS * PAGE - 1} bytes" in message) == ("layout", True)


def test_an_address_that_is_no_device_memory_is_refused(client: ClientHalf) -> None:
    code, _ = client.call("make", [(0x7000_0000, 4096)], [RUN], {})
    assert code in ("device", "range")


# ---------------------------------------------------------------- staging


@pytest.mark.parametrize(("free_mib", "segment_mib"), [(300, 16), (200, 8), (60, 2), (20, 1)])
def test_less_staging_is_taken_where_there_is_less_memory(vendor: Vendor, free_mib: int, segment_mib: int) -> None:
    with Machine(vendor, device_bytes=(free_mib + 2) * MIB) as machine:
        client = ClientHalf(machine)
        client.call("make_staged", 256 * MIB)
        assert client.call("segment_bytes") == segment_mib * MIB
        client.close()


def test_no_room_for_staging_is_refused_naming_the_mode_without(vendor: Vendor) -> None:
    with Machine(vendor, device_bytes=8 * MIB) as machine:
        client = ClientHalf(machine)
        address = client.call("take", BLOCKS * PAGE)
        code, message = client.call("make", [(address, BLOCKS * PAGE)], [RUN], {})
        assert code == "staging-memory"
        assert 'mode="server-gather" needs none' in message
        client.close()


def test_what_is_asked_for_is_gathered_and_scattered(client: ClientHalf) -> None:
    client.call("make_staged")
    client.call("ask", STORE, 3, 6, 0, 2)
    assert client.call("reaches", STORE, 3, DONE) == 0
    client.call("ask", RETRIEVE, 2, 5, 1)  # segments are empty at first: zeroes arrive
    assert client.call("reaches", RETRIEVE, 2, DONE) == 0
    assert client.call("zeroes") == [1, 5]


def test_nonsense_is_answered_with_a_fault_and_the_lane_goes_on(client: ClientHalf) -> None:
    client.call("make_staged")
    client.call("ask", STORE, 0, BLOCKS)
    assert client.call("reaches", STORE, 0, FAULT) == 1
    client.call("ask", STORE, 1, BLOCKS - 1)
    assert client.call("reaches", STORE, 1, DONE) == 0


def test_a_kernel_that_runs_keeps_blocks_and_ring_busy(client: ClientHalf, machine: Machine) -> None:
    """When a retrieve is given up, it must be known when the last write to its blocks has ended."""
    client.call("make_staged")
    with machine.rule("event_query", HANG):
        client.call("ask", RETRIEVE, 0, 4)
        client.call("reaches", RETRIEVE, 0, TAKEN)
        assert not client.call("passed")
        client.call("end_ring")
        assert not client.call("free")
    client.call("reaches", RETRIEVE, 0, DONE)
    client.call("becomes_free")
    assert client.call("passed")


def test_nothing_is_taken_from_a_ring_that_has_ended(client: ClientHalf) -> None:
    """The mover is gone: its last request was never withdrawn, and the blocks belong to the engine again."""
    client.call("make_staged")
    client.call("end_ring")
    client.call("becomes_free")
    client.call("ask", RETRIEVE, 0, 4)
    client.call("begin_ring")
    client.call("ask", RETRIEVE, 0, 5)
    client.call("reaches", RETRIEVE, 0, DONE)
    assert client.call("zeroes") == [5]


def test_a_driver_that_fails_ends_staging_and_says_why(client: ClientHalf, machine: Machine) -> None:
    client.call("make_staged")
    with machine.rule("launch", STICKY, code=ILLEGAL_ADDRESS):
        client.call("ask", STORE, 0, 4)
        assert client.call("reaches", STORE, 0, FAULT) == 2
    assert "700" in client.call("broken")
    client.call("ask", RETRIEVE, 1, 4)
    assert client.call("reaches", RETRIEVE, 1, FAULT) == 2


def test_kernels_that_could_not_be_compiled_are_spoken_of(client: ClientHalf, machine: Machine) -> None:
    with machine.rule("rtc_compile", CODE, code=6):
        client.call("make_staged")
    (said,) = client.call("warnings")
    assert re.search(r"staging taken .* kernels=built-in .* COMPILATION_ERROR", said)


# ---------------------------------------------------------------- events


def test_events_are_reported_when_they_are_done(client: ClientHalf, machine: Machine) -> None:
    client.call("watch", 7, client.call("recorded_event"))
    assert client.call("completed") == [(7, True)]
    with machine.rule("event_query", HANG) as rule:
        client.call("watch", 8, client.call("recorded_event"))
        until("the query to hang", rule.met)
        assert client.call("completed", 0) == []
    assert client.call("completed") == [(8, True)]


def test_an_event_whose_query_fails_is_reported_so(client: ClientHalf, machine: Machine) -> None:
    with machine.rule("event_query", CODE, code=719, times=1):
        client.call("watch", 9, client.call("recorded_event"))
        assert client.call("completed") == [(9, False)]


# ---------------------------------------------------------------- the engine's own doings


@pytest.mark.parametrize("lane", [STORE, RETRIEVE])
def test_transfers_do_not_disturb_a_stream_capture(client: ClientHalf, lane: int) -> None:
    client.call("make_staged")
    assert client.call("capture", lane) == 0


def test_events_are_awaited_without_disturbing_a_stream_capture(client: ClientHalf) -> None:
    assert client.call("capture_beside_event", client.call("recorded_event")) == ([(1, True)], 0)


def test_a_forked_child_leaves_everything_to_its_parent(client: ClientHalf) -> None:
    client.call("make_staged")
    client.call("watch", 1, client.call("recorded_event"))
    client.call("completed")
    assert client.call("fork") == 0
    client.call("ask", RETRIEVE, 0, 3)
    client.call("reaches", RETRIEVE, 0, DONE)
    assert client.call("zeroes") == [3]


def test_a_child_forked_after_the_end_of_a_ring_closes_nobodys_descriptor(client: ClientHalf) -> None:
    """The ring's number is free by then, and soon another descriptor has it."""
    client.call("make_staged")
    client.call("end_ring")
    client.call("becomes_free")
    assert client.call("closed_by_a_child") == 0
