"""The client's one background thread: it waits for sockets, processes' ends, wake-ups and deadlines, all in one poll.

A *conversation* is an `async def` that awaits only Waiters. A waiter is settled once: by a value, by an error, or by
its due time. Rules:

1. Only this thread touches conversations, doors, sessions and registrations. Other threads post().
2. Nothing here blocks but the poll, and the poll always has a reason to end.
3. Settling a waiter only queues its conversation; it never runs inside the one that settles. So no conversation can
   resume itself, and a loss can be announced to all of them from anywhere.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import zmq

from kvclient.counters import Counters

log = logging.getLogger(__name__)

NEVER_S = math.inf
POLL_S_MAX = 3600.0
BUG_PAUSE_S = 0.05
"""Keeps an unexpected exception that repeats from using a whole core."""

Conversation = Coroutine[Any, Any, None]
Source = int | zmq.Socket[bytes]


class Trouble(Exception):
    """A conversation did not get what it asked for, and the caller is not to blame. `why` is what results carry."""

    def __init__(self, why: str, message: str = "", *, unchanged: bool = False) -> None:
        super().__init__(f"{why}: {message}" if message else why)
        self.why = why
        self.message = message
        self.unchanged = unchanged
        """The server says that the request changed nothing."""


class Overdue(Trouble):
    def __init__(self) -> None:
        super().__init__("timeout")


class Lost(Trouble):
    """The connection, or the session on it, is gone."""


class Waiter:
    """What a conversation awaits. `due_s` is on the monotonic clock."""

    __slots__ = ("conversation", "due_s", "error", "is_pause", "settled", "value")

    def __init__(self, due_s: float = NEVER_S, *, is_pause: bool = False) -> None:
        self.due_s = due_s
        self.is_pause = is_pause
        self.settled = False
        self.value: Any = None
        self.error: Exception | None = None
        self.conversation: Conversation | None = None

    def __await__(self) -> Generator["Waiter", None, Any]:
        if not self.settled:
            yield self
        if self.error is not None:
            raise self.error
        return self.value


class Loop:
    """Owns the thread, the poller and the ZeroMQ context."""

    def __init__(self, counters: Counters) -> None:
        self.context = zmq.Context()
        self.recover: Callable[[], None] = lambda: None
        """Called after an unexpected exception, to bring the client back to a known state."""
        self._counters = counters
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posts: deque[Callable[[], None]] = deque()
        self._posting = threading.RLock()  # a finalizer may post in the middle of a post
        self._poller = zmq.Poller()
        self._handlers: dict[Source, Callable[[], None]] = {}
        self._waiting: dict[Waiter, None] = {}
        self._ready: deque[Conversation] = deque()
        self._wake_at_s = NEVER_S
        """Not later than any waiter's due time."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvclient", daemon=True)

    # ---------------------------------------------------------------- from any thread

    def start_thread(self) -> None:
        self.watch(self._wake, self._read_wake)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> bool:
        """Has the thread call `action` soon. False, and nothing happens, when the loop has ended. Callers bound what
        they post: jobs and lookups by Slots, everything else by its nature."""
        with self._posting:
            if self._wake < 0:
                return False
            self._posts.append(action)
            os.eventfd_write(self._wake, 1)
            return True

    def stop(self) -> None:
        """The loop ends when its last conversation has ended."""

        def mark() -> None:
            self._stopping = True

        self.post(mark)

    def join(self, timeout_s: float) -> bool:
        """True when the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the background thread itself: a callback of a future."""
        return threading.current_thread() is self._thread

    def forsake_after_fork(self) -> None:
        """In a forked child, where the thread does not exist: gives the descriptor back, touches nothing else."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    # ---------------------------------------------------------------- from the loop's thread

    def start(self, conversation: Conversation) -> None:
        self._ready.append(conversation)

    def settle(self, waiter: Waiter, value: object = None) -> None:
        if not waiter.settled:
            waiter.settled, waiter.value = True, value
            self._queue(waiter)

    def fail(self, waiter: Waiter, error: Exception) -> None:
        if not waiter.settled:
            waiter.settled, waiter.error = True, error
            self._queue(waiter)

    async def pause(self, seconds: float) -> None:
        await Waiter(time.monotonic() + seconds, is_pause=True)

    def watch(self, source: Source, handler: Callable[[], None]) -> None:
        """Calls `handler` whenever the source is readable."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Source) -> None:
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._ended():
            try:
                self._turn()
            except Exception:
                # The client's edge, and the only place in kvclient that catches everything: whatever is wrong in here
                # must become a miss, never an exception in the engine. The session is dropped, so that every
                # conversation ends as "lost", and a new one is opened.
                log.exception("unexpected error in the client's thread; reconnecting")
                self._counters.add("bugs")
                time.sleep(BUG_PAUSE_S)
                self.recover()
        self.context.destroy(linger=0)

    def _ended(self) -> bool:
        if not self._stopping or self._waiting or self._ready:
            return False
        with self._posting:  # a post is either seen here or refused from now on
            if self._posts:
                return False
            self.unwatch(self._wake)
            os.close(self._wake)
            self._wake = -1
            return True

    def _turn(self) -> None:
        for source, _ in self._poller.poll(self._patience_ms()):
            handler = self._handlers.get(source)  # an earlier handler of this turn may have closed it
            if handler is not None:
                handler()
        for _ in range(len(self._posts)):
            self._posts.popleft()()
        self._expire(time.monotonic())
        while self._ready:
            self._step(self._ready.popleft())

    def _patience_ms(self) -> int:
        if self._ready or self._posts:
            return 0
        seconds = min(max(0.0, self._wake_at_s - time.monotonic()), POLL_S_MAX)
        return math.ceil(seconds * 1000)

    def _read_wake(self) -> None:
        os.eventfd_read(self._wake)

    def _expire(self, now_s: float) -> None:
        if now_s < self._wake_at_s:
            return
        for waiter in [waiter for waiter in self._waiting if waiter.due_s <= now_s]:
            if waiter.is_pause:
                self.settle(waiter)
            else:
                self.fail(waiter, Overdue())
        self._wake_at_s = min((waiter.due_s for waiter in self._waiting), default=NEVER_S)

    def _queue(self, waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)
        if waiter.conversation is not None:
            self._ready.append(waiter.conversation)

    def _step(self, conversation: Conversation) -> None:
        """Runs a conversation up to its next wait."""
        try:
            waiter = conversation.send(None)
        except StopIteration:
            return
        waiter.conversation = conversation
        self._waiting[waiter] = None
        self._wake_at_s = min(self._wake_at_s, waiter.due_s)
