"""The client's thread by itself: what ends a wait, and what cannot stop the thread."""

import threading
import time
from collections.abc import Iterator

import pytest
from fake_server import WAIT_S

from kvclient import Counters
from kvclient.loop import Conversation, Loop, Lost, Overdue, Waiter


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
