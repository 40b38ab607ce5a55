"""Descriptors whose memory is wrong from the start or becomes so later: a typed error, and the mover lives on."""

import fcntl
import os
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvserver._native import FAILED, create_memfd
from kvserver.wire import messages as wire
from tests.process.bad_input.abuse import BLOCKS, GROUP, POOL_BYTES, Abuser, Victim, refusal
from tests.process.engine import prompt
from tests.process.harness import maps, stopped, until

KEYS = prompt(951, chunks=3).keys
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
F_SEAL_FUTURE_WRITE = 0x10


@pytest.fixture(scope="module")
def running() -> Iterator[Victim]:
    with Victim(mover_grace_ms=20_000) as victim:
        yield victim


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """A server that must come out of the test unharmed."""
    yield running
    running.unharmed()


@pytest.fixture
def abuser(victim: Victim) -> Iterator[Abuser]:
    with Abuser(victim) as attached:
        yield attached


# ---------------------------------------------------------------- memory as it is offered


def _sealed(seals: int) -> int:
    memory = create_memfd("abuser-sealed", POOL_BYTES, sealed=False)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def _reopened(flags: int) -> int:
    memory = create_memfd("abuser-reopened", POOL_BYTES)
    try:
        return os.open(f"/proc/self/fd/{memory}", flags)
    finally:
        os.close(memory)


def _pipe() -> int:
    end, other = os.pipe()
    os.close(other)
    return end


def _regular_file() -> int:
    with tempfile.TemporaryFile(dir=Path(__file__).parent, buffering=0) as file:
        file.truncate(2 * POOL_BYTES)
        return os.dup(file.fileno())


def _socket() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()


NO_MEMORY: dict[str, tuple[Callable[[], int], str, str]] = {
    "pipe": (_pipe, "descriptor-seal", "not a shared-memory file"),
    "regular file": (_regular_file, "descriptor-seal", "not a shared-memory file"),
    "directory": (lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY), "descriptor-seal", "not a shared-memory file"),
    "socket": (_socket, "descriptor-seal", "not a shared-memory file"),
    "eventfd": (lambda: os.eventfd(0), "descriptor-seal", "not a shared-memory file"),
    "/dev/zero": (lambda: os.open("/dev/zero", os.O_RDWR), "descriptor-seal", "not a shared-memory file"),
    "path only": (lambda: _reopened(os.O_PATH), "descriptor-seal", "not a shared-memory file"),
    "read only": (lambda: _reopened(os.O_RDONLY), "descriptor-seal", "not open for reading and writing"),
    "sealed against writing": (lambda: _sealed(fcntl.F_SEAL_WRITE), "descriptor-seal", "sealed against writing"),
    "sealed against new writers": (lambda: _sealed(F_SEAL_FUTURE_WRITE), "descriptor-seal", "sealed against writing"),
    "one byte too small": (
        lambda: create_memfd("abuser-small", POOL_BYTES - 1),
        "descriptor-size",
        f"needs {POOL_BYTES} bytes, its file has {POOL_BYTES - 1}",
    ),
    "empty": (lambda: os.memfd_create("abuser-empty"), "descriptor-size", f"needs {POOL_BYTES} bytes, its file has 0"),
}


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_what_is_no_memory_is_refused_and_the_name_stays_free(victim: Victim, abuser: Abuser, kind: str) -> None:
    make, code, says = NO_MEMORY[kind]
    descriptor = make()
    try:
        request = abuser.registration(descriptor)
    finally:
        os.close(descriptor)
    refusal(abuser.ask(request), "request", code, says)
    refusal(abuser.ask(request, id=abuser.next_id()), "request", "descriptor-unknown", "or is used up")
    abuser.register()
    assert abuser.ask(abuser.storing(KEYS, range(9))).chunks == 3


def test_memory_that_shrank_before_it_was_mapped_is_refused(victim: Victim, abuser: Abuser) -> None:
    request = abuser.registration(abuser.pool)
    os.ftruncate(abuser.pool, POOL_BYTES - 1)
    refusal(abuser.ask(request), "request", "descriptor-size", f"its file has {POOL_BYTES - 1}")


def test_the_second_of_two_buffers_is_named(victim: Victim, abuser: Abuser) -> None:
    small = create_memfd("abuser-small", 4099)
    request = abuser.registration(abuser.pool)
    buffers = [*request.buffers, wire.Buffer(abuser.offer(small), b"", 4100)]
    os.close(small)
    refusal(abuser.ask(request, buffers=buffers), "request", "descriptor-size", "buffer 1 needs 4100 bytes", "4099")
    until("the first one to be let go", lambda: not maps(victim.server.mover_pid(), "abuser"))


def test_a_huge_sparse_file_costs_no_memory(victim: Victim, abuser: Abuser) -> None:
    """No page of it is touched before a copy needs it."""
    sparse = create_memfd("abuser-sparse", 1 << 40)
    request = abuser.registration(sparse, buffer_bytes=1 << 40)
    assert isinstance(abuser.ask(request), wire.Registered)
    victim.serves()
    assert os.fstat(sparse).st_blocks == 0
    os.close(sparse)


# ---------------------------------------------------------------- memory that changes later


def test_a_pool_that_was_cut_off_fails_its_jobs_and_nothing_else(victim: Victim, abuser: Abuser) -> None:
    abuser.register()
    assert abuser.ask(abuser.storing(KEYS, range(9))).chunks == 3
    os.ftruncate(abuser.pool, 0)
    store = abuser.storing(prompt(952, chunks=3).keys, range(9))
    refusal(abuser.ask(store), "device", "pool-shrunk")
    assert abuser.board.state(store.word) == (store.generation, FAILED)
    victim.serves()
    retrieve = abuser.retrieving(abuser.lookup(KEYS).lease, range(9))
    refusal(abuser.ask(retrieve), "device", "pool-shrunk")
    assert abuser.board.state(retrieve.word) == (retrieve.generation, FAILED)
    victim.serves()
    assert abuser.lookup(prompt(952, chunks=3).keys).chunks == 0
    os.ftruncate(abuser.pool, POOL_BYTES)
    good = abuser.retrieving(abuser.lookup(KEYS).lease, range(9))
    assert isinstance(abuser.ask(good), wire.Retrieved), "what was stored before is still there"
    assert isinstance(abuser.ask(wire.Unregister(abuser.next_id(), abuser.cache)), wire.Unregistered)


def test_a_pool_that_loses_its_end_fails_only_what_lies_there(victim: Victim, abuser: Abuser) -> None:
    run = wire.RegionRun(0, 13, 1, 0, PAGE_BYTES // 4, 129)
    pool_bytes = BLOCKS * run.block_stride
    os.ftruncate(abuser.pool, pool_bytes)
    request = abuser.registration(abuser.pool, buffer_bytes=pool_bytes)
    registered = abuser.ask(request, groups=[msgspec.structs.replace(GROUP, regions=[run])])
    assert isinstance(registered, wire.Registered)
    abuser.cache = registered.cache
    os.ftruncate(abuser.pool, PAGE_BYTES)
    refusal(abuser.ask(abuser.storing(KEYS[:32], [0, 1, 4])), "device", "pool-shrunk")
    assert abuser.ask(abuser.storing(KEYS[:32], [0, 1, 3])).chunks == 1


def test_a_pool_that_is_cut_off_again_and_again_never_ends_the_mover(victim: Victim, abuser: Abuser) -> None:
    """The file is truncated while copies run, so that some of them are hit in the middle."""
    abuser.register()
    over = threading.Event()

    def cut() -> None:
        while not over.is_set():
            os.ftruncate(abuser.pool, 0)
            os.ftruncate(abuser.pool, POOL_BYTES)

    saw = threading.Thread(target=cut)
    saw.start()
    outcomes: Counter[str] = Counter()
    try:
        for round_number in range(300):
            keys = prompt(960 + round_number, chunks=3).keys
            reply = abuser.ask(abuser.storing(keys, range(9)))
            outcomes[reply.code if isinstance(reply, wire.Error) else "stored"] += 1
            if isinstance(reply, wire.Stored):
                reply = abuser.ask(abuser.retrieving(abuser.lookup(keys).lease, range(9)))
                outcomes[reply.code if isinstance(reply, wire.Error) else "retrieved"] += 1
    finally:
        over.set()
        saw.join()
    print(outcomes)
    assert set(outcomes) <= {"stored", "retrieved", "pool-shrunk"}
    assert outcomes["pool-shrunk"]
    assert abuser.ask(abuser.storing(KEYS, range(9))).chunks == 3


# ---------------------------------------------------------------- clients that die meanwhile


def test_a_client_that_dies_before_its_bad_memory_is_looked_at_ends_no_mover(victim: Victim) -> None:
    """The brain orders the mover to drop the cache before the mover has seen that its memory is bad."""
    mover = victim.server.mover_pid()
    with stopped(mover):
        for make, _, _ in NO_MEMORY.values():
            with Abuser(victim, engine="doomed") as doomed:
                descriptor = make()
                doomed.send(doomed.registration(descriptor))
                os.close(descriptor)
                until("the register to arrive", lambda: victim.server.status().caches > 1)
            until("the session to end", lambda: victim.server.status().sessions == 2)
    until("the mover to have read all of it", lambda: victim.server.status().caches == 1)
    assert victim.server.mover_pid() == mover


def test_a_mover_keeps_nothing_of_sessions_that_are_over(victim: Victim) -> None:
    """Includes sessions that unregistered before they ended."""
    mover = victim.server.mover_pid()
    for unregisters in (True, False) * 3:
        with Abuser(victim, engine="passing") as passing:
            passing.register()
            if unregisters:
                assert isinstance(passing.ask(wire.Unregister(7, passing.cache)), wire.Unregistered)
    until("one board to be left", lambda: _mapped(mover, "kvserver-board") == 1)
    until("no pool to be left", lambda: _mapped(mover, "abuser-pool") == 0)


def _mapped(pid: int, name: str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(f"memfd:{name}")
