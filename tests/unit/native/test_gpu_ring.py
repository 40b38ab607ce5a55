"""The staging ring between two processes, one of which may stop, die, or write nonsense in any state."""

import mmap
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from kvserver._native import RingOwner, RingPeer, create_memfd, pack_stretches

MIB = 1 << 20
STORE, RETRIEVE = 0, 1
EMPTY, ASKED, TAKEN, DONE, FAULT = range(5)
WAIT_S = 30
STRETCH = (2, 1, array("i", [7, 5, 6]).tobytes(), 48, 0, 999)
CELLS_AT = 4096
"""Offset of the ring's first cell: its word comes first, the length of its list third."""

# A client in its own process: makes the ring, hands over its descriptor, and obeys one command per line.
CLIENT = """
import socket, sys
from kvserver._native import RingOwner
ring = RingOwner(1 << 20)
end = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(end, [b"ring"], [ring.fd])
for line in sys.stdin:
    name, *numbers = line.split()
    print(getattr(ring, name)(*map(int, numbers)), flush=True)
"""


class OtherProcess:
    """The client, killed at the end of the test."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
            ours.settimeout(WAIT_S)
            _, (descriptor,), _, _ = socket.recv_fds(ours, 16, 1)
        self.peer = RingPeer(descriptor, MIB)
        os.close(descriptor)

    def does(self, command: str) -> str:
        self.tell(command)
        return self.hears()

    def tell(self, command: str) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(command + "\n")
        stdin.flush()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(WAIT_S)
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.process.kill()
    process.process.communicate()


def both(segment_bytes: int = MIB) -> tuple[RingOwner, RingPeer]:
    owner = RingOwner(segment_bytes)
    return owner, RingPeer(owner.fd, segment_bytes)


# ---------------------------------------------------------------- the states of a segment


def test_a_segment_goes_round(other: OtherProcess) -> None:
    peer = other.peer
    for sequence in range(3):
        assert peer.state(STORE, 2) == EMPTY
        assert peer.ask(STORE, 2, 41 + sequence, [STRETCH])
        assert peer.state(STORE, 2) == ASKED
        assert other.does("take 1") == "None"
        assert other.does("take 0") == str((2, sequence, 41 + sequence, 0, pack_stretches([STRETCH])))
        assert peer.state(STORE, 2) == TAKEN
        other.does(f"done 0 2 {sequence}")
        assert peer.state(STORE, 2) == DONE
        peer.recycle(STORE, 2)


def test_segments_are_taken_in_order_and_over_holes() -> None:
    owner, peer = both()
    for segment in (0, 1, 2):
        assert peer.ask(RETRIEVE, segment, segment, [STRETCH])
    assert owner.take(RETRIEVE)[:3] == (0, 0, 0)
    assert peer.withdraw(RETRIEVE, 1)
    assert peer.ask(RETRIEVE, 3, 33, [STRETCH])
    assert owner.take(RETRIEVE)[:3] == (2, 0, 2)
    assert owner.take(RETRIEVE)[:3] == (3, 0, 33)
    assert peer.ask(RETRIEVE, 1, 11, [STRETCH])
    assert owner.take(RETRIEVE)[:3] == (1, 1, 11)
    assert owner.take(RETRIEVE) is None


def test_what_is_not_empty_cannot_be_asked_again() -> None:
    owner, peer = both()
    assert peer.ask(STORE, 0, 1, [STRETCH])
    assert not peer.ask(STORE, 0, 2, [STRETCH])
    assert owner.take(STORE)[2] == 1
    assert not peer.ask(STORE, 0, 2, [STRETCH])
    owner.done(STORE, 0, 0)
    assert not peer.ask(STORE, 0, 2, [STRETCH])


def test_what_was_taken_cannot_be_withdrawn() -> None:
    owner, peer = both()
    peer.ask(STORE, 0, 1, [STRETCH])
    owner.take(STORE)
    assert not peer.withdraw(STORE, 0)
    assert peer.state(STORE, 0) == TAKEN
    owner.fault(STORE, 0, 0, 2)
    assert (peer.state(STORE, 0), peer.fault(STORE, 0)) == (FAULT, 2)
    peer.recycle(STORE, 0)
    assert peer.ask(STORE, 0, 1, [STRETCH])
    assert peer.fault(STORE, 0) == 0


def test_a_late_answer_does_not_end_the_next_sequence() -> None:
    """A client that was stopped reports a segment as done that belongs to another job meanwhile."""
    owner, peer = both()
    peer.ask(STORE, 0, 1, [STRETCH])
    owner.take(STORE)
    peer.recycle(STORE, 0)
    peer.ask(STORE, 0, 2, [STRETCH])
    owner.take(STORE)
    owner.done(STORE, 0, 0)
    owner.fault(STORE, 0, 0, 1)
    assert peer.state(STORE, 0) == TAKEN
    owner.done(STORE, 0, 1)
    assert peer.state(STORE, 0) == DONE


# ---------------------------------------------------------------- sleeping and waking


def test_asking_wakes_the_sleeper(other: OtherProcess) -> None:
    for sequence in range(20):
        other.tell(f"sleep {WAIT_S * 1000}")
        other.tell("take 1")
        assert other.peer.ask(RETRIEVE, 0, 1, [STRETCH])
        assert other.hears() == "None"  # sleep() returned, whether it had begun before the ask or not
        assert other.hears() != "None"
        other.does(f"done 1 0 {sequence}")
        other.peer.recycle(RETRIEVE, 0)


def test_nobody_sleeps_while_something_is_asked() -> None:
    owner, peer = both()
    peer.ask(STORE, 3, 1, [STRETCH])
    owner.sleep(WAIT_S * 1000)
    assert owner.take(STORE) is not None


def test_sleep_ends_by_itself() -> None:
    RingOwner(MIB).sleep(1)


# ---------------------------------------------------------------- the client stops or dies


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("state", [EMPTY, ASKED, TAKEN, DONE], ids=["empty", "asked", "taken", "done"])
def test_the_mover_goes_on_whatever_becomes_of_the_client(other: OtherProcess, state: int, number: int) -> None:
    peer = other.peer
    if state >= ASKED:
        assert peer.ask(STORE, 0, 1, [STRETCH])
    if state >= TAKEN:
        other.does("take 0")
    if state >= DONE:
        other.does("done 0 0 0")
    other.signal(number)
    assert peer.state(STORE, 0) == state
    assert peer.withdraw(STORE, 0) == (state == ASKED)
    if state == DONE:
        peer.recycle(STORE, 0)
    assert peer.ask(STORE, 0, 2, [STRETCH]) == (state != TAKEN)  # its segments stay out of use, nothing else does
    assert peer.ask(STORE, 1, 2, [STRETCH])
    assert peer.ask(RETRIEVE, 0, 3, [STRETCH])


def test_a_client_that_goes_on_finds_everything_as_it_is_now(other: OtherProcess) -> None:
    peer = other.peer
    peer.ask(STORE, 0, 1, [STRETCH])
    peer.ask(STORE, 1, 1, [STRETCH])
    other.does("take 0")
    other.signal(signal.SIGSTOP)
    assert not peer.withdraw(STORE, 0)
    assert peer.withdraw(STORE, 1)
    peer.ask(STORE, 1, 2, [STRETCH])
    other.signal(signal.SIGCONT)
    other.does("done 0 0 0")
    assert peer.state(STORE, 0) == DONE
    assert other.does("take 0").startswith("(1, 1, 2,")


# ---------------------------------------------------------------- nonsense in the ring


def written(owner: RingOwner, at: int, value: int) -> None:
    with mmap.mmap(owner.fd, CELLS_AT + 4096) as memory:
        memory[at : at + 8] = value.to_bytes(8, "little")


@pytest.mark.parametrize("word", [5, 255, 1 << 8 | DONE, (1 << 64) - 1, 7 << 8 | EMPTY])
def test_a_word_that_makes_no_sense_is_a_fault_to_the_mover(word: int) -> None:
    owner, peer = both()
    peer.ask(STORE, 0, 1, [STRETCH])
    written(owner, CELLS_AT, word)
    assert peer.state(STORE, 0) == FAULT
    assert not peer.ask(STORE, 0, 2, [STRETCH])
    assert not peer.withdraw(STORE, 0)
    peer.recycle(STORE, 0)
    assert peer.ask(STORE, 0, 2, [STRETCH])
    assert owner.take(STORE)[:3] == (0, 1, 2)


def test_an_impossible_length_gives_the_client_an_empty_list() -> None:
    owner, peer = both()
    peer.ask(STORE, 0, 1, [STRETCH])
    written(owner, CELLS_AT + 16, 0xFFFF_FFFF)
    assert owner.take(STORE) == (0, 0, 1, 0, b"")


def test_an_unknown_work_gives_the_client_an_empty_list() -> None:
    owner, peer = both()
    peer.ask(STORE, 0, 1, [STRETCH], 3)
    assert owner.take(STORE) == (0, 0, 1, 3, b"")


def test_sums_come_back_with_the_end() -> None:
    owner, peer = both()
    for work in (1, 2):
        assert peer.ask(RETRIEVE, 4, 1, [STRETCH, STRETCH], work)
        segment, sequence, _, asked, _ = owner.take(RETRIEVE)
        assert asked == work
        sums = array("Q", [11 * work, 999, 2**64 - 1, 2**64 - 1]).tobytes()
        owner.done(RETRIEVE, segment, sequence, sums)
        assert peer.state(RETRIEVE, 4) == DONE
        assert peer.sums(RETRIEVE, 4, 2) == sums, "any numbers: whoever asked judges them"
        assert peer.sums(RETRIEVE, 5, 1) == bytes(16), "of the next segment"
        peer.recycle(RETRIEVE, 4)
    peer.ask(RETRIEVE, 4, 1, [STRETCH, STRETCH], 1)
    owner.take(RETRIEVE)
    owner.done(RETRIEVE, 4, 2)
    assert peer.sums(RETRIEVE, 4, 2) == array("Q", [2**64 - 1, 0] * 2).tobytes(), "none of an earlier ask"


def test_a_file_that_is_no_ring_is_refused() -> None:
    owner = RingOwner(MIB)
    size = os.fstat(owner.fd).st_size
    with pytest.raises(ValueError, match=f"staging: the ring says segments of {MIB} bytes, the registration {2 * MIB}"):
        RingPeer(owner.fd, 2 * MIB)
    for bytes_there, sealed, says in (
        (size - 4096, True, f"staging: the ring has {size - 4096} bytes, expected {size}"),
        (size, False, "sealed against shrinking"),
        (size, True, "staging: the ring says segments of 0 bytes"),
    ):
        descriptor = create_memfd("test", bytes_there, sealed=sealed)
        with pytest.raises(ValueError, match=says):
            RingPeer(descriptor, MIB)
        os.close(descriptor)
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="the ring must be shared memory"):
        RingPeer(reading, MIB)
    os.close(reading)
    os.close(writing)


def test_a_forked_child_does_not_have_the_ring() -> None:
    """The client's words must have one writer."""
    owner = RingOwner(MIB)
    assert rings_mapped() == 1
    child = os.fork()
    if child == 0:
        os._exit(rings_mapped())
    assert os.waitpid(child, 0) == (child, 0)
    assert owner.take(STORE) is None


def rings_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("kvserver-ring")
