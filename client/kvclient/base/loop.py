"""The client's one background thread: it waits for sockets, process ends, wake-ups and deadlines in one poll.

A *conversation* is an `async def` that awaits only Waiters. A waiter is settled once: by a value, by an error, or by
its due time. Rules:

1. Only the thread that has the turn touches conversations, doors, sessions and registrations. This is the background
   thread whenever it does not sleep, or a caller whose job begins meanwhile, its *guest*. A guest runs a new
   conversation up to its first wait, so that its request leaves at once. Otherwise it would wait for the background
   thread to wake up and to get the interpreter from a busy engine. All other threads post().
2. ZeroMQ's sockets and the poller belong to the background thread alone, which may be polling at that moment. A
   conversation that needs them awaits own_thread() first.
3. Nothing here blocks except the poll, and the poll always has a reason to end.
4. Settling a waiter only queues its conversation, and never runs it. So no conversation can resume itself, and a loss
   can be announced to all of them from anywhere.
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
"""Keeps a repeated unexpected exception from using a whole core."""

Conversation = Coroutine[Any, Any, None]
Source = int | zmq.Socket[bytes]


class Trouble(Exception):
    """A conversation did not get what it asked for, and the caller is not to blame. Results carry `why`."""

    def __init__(self, why: str, message: str = "", *, unchanged: bool = False) -> None:
        super().__init__(f"{why}: {message}" if message else why)
        self.why = why
        self.message = message
        self.unchanged = unchanged
        """Whether the server says that the request changed nothing."""


class Overdue(Trouble):
    def __init__(self) -> None:
        super().__init__("timeout")


class Lost(Trouble):
    """The connection, or the session on it, is gone."""


class Waiter:
    """The thing that a conversation awaits. `due_s` is on the monotonic clock."""

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
    """The loop. Owns the thread, the poller and the ZeroMQ context."""

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
        self._new: deque[Conversation] = deque()
        """Conversations that a guest has started and runs itself."""
        self._turn = threading.Lock()
        self._guest = 0
        """Thread id of the guest that has the turn; 0 if none."""
        self._wake_at_s = NEVER_S
        """Time of the next wake-up, not later than any waiter's due time."""
        self._sleeps_until_s = NEVER_S
        """Latest end of the current poll."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvclient", daemon=True)

    # ---------------------------------------------------------------- from any thread

    def start_thread(self) -> None:
        self.watch(self._wake, self._read_wake)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> bool:
        """Make the thread call `action` soon. False, with no effect, if the loop has ended.

        Callers bound what they post: jobs and lookups by Slots, everything else by its nature.
        """
        with self._posting:
            if self._wake < 0:
                return False
            self._posts.append(action)
            os.eventfd_write(self._wake, 1)
            return True

    def enter(self, begin: Callable[[], Conversation]) -> bool:
        """Start a conversation: at once as a guest if nothing older waits for a turn, otherwise soon.

        False, with no effect, if the loop has ended.
        """
        if self._turn.acquire(blocking=False):
            try:
                if self._wake >= 0 and not (self._posts or self._ready):
                    self._host(begin())
                    return True
            finally:
                self._turn.release()
        return self.post(lambda: self.start(begin()))

    def stop(self) -> None:
        """End the loop when its last conversation has ended."""

        def mark() -> None:
            self._stopping = True

        self.post(mark)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller has the turn, as in a callback of a future."""
        return threading.get_ident() in (self._thread.ident, self._guest)

    def forsake_after_fork(self) -> None:
        """Close the descriptor in a forked child, which lacks the thread, and touch nothing else."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    # ---------------------------------------------------------------- for whoever has the turn

    def start(self, conversation: Conversation) -> None:
        (self._new if self._guest else self._ready).append(conversation)

    async def own_thread(self) -> None:
        """Continue in the background thread, for ZeroMQ or the poller."""
        if self._guest:
            waiter = Waiter()
            self.post(lambda: self.settle(waiter))
            await waiter

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
        """Call `handler` whenever the source is readable."""
        assert not self._guest
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Source) -> None:
        assert not self._guest
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    # ---------------------------------------------------------------- the guest

    def _host(self, conversation: Conversation) -> None:
        """Run new conversations up to their first wait, with the turn. The background thread runs what becomes
        ready."""
        self._guest = threading.get_ident()
        self._new.append(conversation)
        try:
            while self._new:
                self._step(self._new.popleft())
        except BaseException as problem:  # the loop must go on, and tells what happened
            self.post(self.recover)
            if not isinstance(problem, Exception):  # raised by the engine's own signal handler: passed on
                raise
            self._note_bug()
        finally:
            self._ready.extend(self._new)
            self._new.clear()
            self._guest = 0
            if self._ready or self._wake_at_s < self._sleeps_until_s:
                os.eventfd_write(self._wake, 1)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        readable: list[tuple[Source, int]] = []
        while True:
            try:
                with self._turn:
                    self._take_turn(readable)
                    if self._ended():
                        break
                    patience_ms = self._patience_ms()
                readable = self._poller.poll(patience_ms)
            except BaseException:  # any: an interrupt of a guest may surface in its conversation here
                readable = []
                self._note_bug()
                time.sleep(BUG_PAUSE_S)
                with self._turn:
                    self.recover()
        self.context.destroy(linger=0)

    def _note_bug(self) -> None:
        """Log and count a bug. This is the client's edge, the only place that handles every unexpected exception.

        A bug must become a miss and never an exception in the engine. The session is dropped, so that every
        conversation ends as "lost", and a new session is opened.
        """
        log.exception("unexpected error in the client; reconnecting")
        self._counters.add("bugs")

    def _ended(self) -> bool:
        if not self._stopping or self._waiting or self._ready:
            return False
        with self._posting:  # a post is either seen here or refused from now on
            if self._posts:
                return False
            wake, self._wake = self._wake, -1  # first: a child that is forked now must not close it again
            self.unwatch(wake)
            os.close(wake)
            return True

    def _take_turn(self, readable: list[tuple[Source, int]]) -> None:
        for source, _ in readable:
            handler = self._handlers.get(source)  # an earlier handler of this turn may have closed it
            if handler is not None:
                handler()
        for _ in range(len(self._posts)):
            self._posts.popleft()()
        self._expire(time.monotonic())
        while self._ready:
            self._step(self._ready.popleft())

    def _patience_ms(self) -> int:
        self._sleeps_until_s = self._wake_at_s
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
        """Run a conversation up to its next wait."""
        try:
            waiter = conversation.send(None)
        except StopIteration:
            return
        waiter.conversation = conversation
        self._waiting[waiter] = None
        self._wake_at_s = min(self._wake_at_s, waiter.due_s)
