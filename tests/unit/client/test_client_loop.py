"""The client's thread by itself: what ends a wait, and that nothing stops the thread."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvclient import Counters
from kvclient.base.loop import Conversation, Loop, Lost, Overdue, Waiter
from tests.rigs.fake_server import WAIT_S


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop(Counters())
    running.start_thread()
    yield running
    running.stop()
    assert running.join(WAIT_S)


def test_waiter_is_settled_once_by_whatever_comes_first(loop: Loop) -> None:
    seen: list[str] = []
    ended = threading.Event()

    async def watch(waiter: Waiter, name: str) -> None:
        try:
            seen.append(f"{name} {await waiter}")
        except (Overdue, Lost) as error:
            seen.append(f"{name} {error}")
        if len(seen) == 4:
            ended.set()

    def begin() -> None:
        now_s = time.monotonic()
        value, lost, late, paused = Waiter(now_s), Waiter(now_s), Waiter(now_s), Waiter(now_s, is_pause=True)
        for waiter, name in ((value, "value"), (lost, "lost"), (late, "late"), (paused, "paused")):
            loop.start(watch(waiter, name))
        loop.settle(value, 7)
        loop.settle(value, 8)
        loop.fail(lost, Lost("away"))
        loop.settle(lost, 9)

    loop.post(begin)
    assert ended.wait(WAIT_S)
    assert sorted(seen) == ["late timeout", "lost away", "paused None", "value 7"]


def test_unexpected_error_leaves_what_was_posted_behind_it(loop: Loop) -> None:
    done, recovered = threading.Event(), threading.Event()
    loop.recover = recovered.set

    def begin() -> None:
        loop.post(lambda: 1 // 0)
        loop.post(done.set)

    loop.post(begin)
    assert recovered.wait(WAIT_S)
    assert done.wait(WAIT_S)


def test_loop_ends_after_its_last_conversation_and_takes_no_more(loop: Loop) -> None:
    waiter = Waiter()

    async def wait() -> None:
        await waiter

    def start(conversation: Conversation) -> None:
        loop.start(conversation)

    loop.post(lambda: start(wait()))
    loop.stop()
    loop.post(lambda: None)
    assert not loop.join(0.05)
    assert loop.post(lambda: loop.settle(waiter))
    assert loop.join(WAIT_S)
    assert not loop.post(lambda: None)


def test_a_post_that_was_taken_happens_before_the_loop_ends(loop: Loop) -> None:
    taken: list[bool] = []
    done = threading.Event()

    def begin() -> None:
        loop.stop()
        loop.post(lambda: taken.append(loop.post(done.set)))  # in the turn in which the loop could end

    loop.post(begin)
    assert loop.join(WAIT_S)
    assert taken == [True]
    assert done.is_set()


# ---------------------------------------------------------------- guests


def asleep(loop: Loop) -> None:
    """Returns when the background thread is idle, so that the next action may be a guest's."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        seen = threading.Event()
        loop.post(seen.set)
        assert seen.wait(WAIT_S)
        if loop._turn.acquire(timeout=WAIT_S):
            idle = not loop._posts and not loop._ready
            loop._turn.release()
            if idle:
                return


def noting(threads: list[int], waiter: Waiter | None = None, ended: threading.Event | None = None) -> Conversation:
    async def note() -> None:
        threads.append(threading.get_ident())
        if waiter is not None:
            await waiter
            threads.append(threading.get_ident())
        if ended is not None:
            ended.set()

    return note()


def test_a_guest_runs_a_new_conversation_and_those_that_it_starts_up_to_their_first_wait(loop: Loop) -> None:
    threads: list[int] = []
    waiter, ended = Waiter(), threading.Event()

    async def outer() -> None:
        threads.append(threading.get_ident())
        loop.start(noting(threads, waiter, ended))

    asleep(loop)
    assert loop.enter(outer)
    here = threading.get_ident()
    assert threads == [here, here]
    assert not ended.is_set()
    loop.post(lambda: loop.settle(waiter))
    assert ended.wait(WAIT_S)
    assert threads[2] not in (0, here)


def test_what_a_guest_makes_ready_goes_on_in_the_background_thread(loop: Loop) -> None:
    threads: list[int] = []
    waiter, ended = Waiter(), threading.Event()

    async def settle() -> None:
        loop.settle(waiter)

    loop.post(lambda: loop.start(noting(threads, waiter, ended)))
    asleep(loop)
    loop.enter(settle)
    assert ended.wait(WAIT_S)
    assert threading.get_ident() not in threads


def test_own_thread_leaves_the_guest(loop: Loop) -> None:
    threads: list[int] = []
    ended = threading.Event()

    async def move() -> None:
        threads.append(threading.get_ident())
        await loop.own_thread()
        threads.append(threading.get_ident())
        await loop.own_thread()
        threads.append(threading.get_ident())
        ended.set()

    asleep(loop)
    loop.enter(move)
    assert ended.wait(WAIT_S)
    here, there, there_still = threads
    assert here == threading.get_ident() != there == there_still


def test_a_guest_does_not_overtake_what_was_posted(loop: Loop) -> None:
    order: list[int] = []
    busy, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold_the_turn() -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    def numbered(number: int) -> Callable[[], Conversation]:
        async def note() -> None:
            order.append(number)
            if number == 4:
                ended.set()

        return note

    loop.post(hold_the_turn)
    assert busy.wait(WAIT_S)
    for number in range(5):
        loop.enter(numbered(number))
    assert order == []
    go_on.set()
    assert ended.wait(WAIT_S)
    assert order == [0, 1, 2, 3, 4]


def test_a_guest_does_not_overtake_what_the_background_thread_has_not_seen_yet(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    asleep_still, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def sleep_on(patience_ms: int) -> list[object]:
        asleep_still.set()
        assert go_on.wait(WAIT_S)
        return []

    async def note(name: str) -> None:
        order.append(name)
        if len(order) == 2:
            ended.set()

    monkeypatch.setattr(loop._poller, "poll", sleep_on)
    loop.post(lambda: None)
    assert asleep_still.wait(WAIT_S)
    asleep_still.clear()
    loop.post(lambda: loop.start(note("posted")))
    loop.enter(lambda: note("entered"))
    assert order == []
    go_on.set()
    assert ended.wait(WAIT_S)
    assert order == ["posted", "entered"]


def test_a_deadline_that_a_guest_brings_is_kept_though_the_thread_sleeps_longer(loop: Loop) -> None:
    ended = threading.Event()

    async def wait(seconds: float) -> None:
        await loop.pause(seconds)
        ended.set()

    loop.post(lambda: loop.start(wait(0.01)))  # ends any earlier sleep of the thread
    assert ended.wait(WAIT_S)
    asleep(loop)
    ended.clear()
    loop.enter(lambda: wait(0.01))
    assert ended.wait(WAIT_S)


def test_unexpected_error_of_a_guest_is_a_bug_of_ours_and_not_the_callers(loop: Loop) -> None:
    recovered: list[int] = []
    told = threading.Event()

    def recover() -> None:
        recovered.append(threading.get_ident())
        told.set()

    async def fail() -> None:
        loop.start(noting(threads))
        raise ZeroDivisionError

    threads: list[int] = []
    loop.recover = recover
    asleep(loop)
    assert loop.enter(fail)
    assert told.wait(WAIT_S)
    assert recovered != [threading.get_ident()]
    asleep(loop)
    assert len(threads) == 1, "what it had started before goes on"
    assert loop._counters.bugs == 1


def test_an_interrupt_passes_to_the_caller_and_the_client_starts_afresh(loop: Loop) -> None:
    recovered = threading.Event()
    loop.recover = recovered.set

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def interrupted_while_ending() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            await loop.own_thread()

    asleep(loop)
    with pytest.raises(KeyboardInterrupt):
        loop.enter(interrupted)
    assert recovered.wait(WAIT_S)
    recovered.clear()
    asleep(loop)
    loop.enter(interrupted_while_ending)
    assert recovered.wait(WAIT_S), "it came out in the background thread, which lives on"
    asleep(loop)


def test_guests_of_many_threads_and_the_background_thread_take_turns(loop: Loop) -> None:
    held: list[int] = []
    most = [0]
    counted = [0]
    ended = threading.Event()

    async def alone(rounds: int) -> None:
        for _ in range(rounds):
            held.append(1)
            most[0] = max(most[0], len(held))
            time.sleep(0)  # another thread runs
            held.pop()
            await loop.pause(0)
        counted[0] += 1
        if counted[0] == 7 * 23:
            ended.set()

    def enter_often() -> None:
        for number in range(23):
            assert loop.enter(partial(alone, number % 5))

    threads = [threading.Thread(target=enter_often) for _ in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert ended.wait(WAIT_S)
    assert most[0] == 1


def test_a_loop_that_has_ended_takes_no_guest(loop: Loop) -> None:
    loop.stop()
    assert loop.join(WAIT_S)
    assert not loop.enter(lambda: noting([]))
