"""A driver that somebody else has written: loaded by its name, and kept from harming anything but itself.

Each call runs on a thread that nobody else needs, on memory of its own. So a plug-in that hangs costs its caller a
deadline and nothing else, and what it writes afterwards reaches nobody. Each answer is looked at: another shape or size
is an error. Whether bytes are the right ones, the digests of their head say. A plug-in that ends the process ends the
mover of its store, which the server starts again.
"""

import importlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, get_args

from kvserver.errors import ConfigError
from kvserver.remote.objects.driver import Driver, Named, Start
from kvserver.remote.secrets import CurrentSecret, Secret
from kvserver.remote.store import Facts, Problem, StoreError

OPEN_S, FACTS_S, CLOSE_S = 10.0, 2.0, 1.0
GRACE_S = 0.5
"""A call may end so much later than it should."""
HUNG_MAX = 16
"""Calls that have not ended, of which nobody waits for the end. With so many the plug-in is not called any more."""
_HUNG: Counter[str] = Counter()
"""Name of a plug-in -> such calls of it in this process: a store that cannot be used is opened again and again."""
_COUNTING = threading.Lock()
TEXT_CHARS_MAX = 300
T = TypeVar("T")


class PluggedIn:
    """A Driver around one that is not trusted to keep the contract."""

    def __init__(self, name: str, options: Mapping[str, str], password: CurrentSecret | None) -> None:
        """name: "package.module:Class", which is called with the options and a function that returns the password.

        Raises StoreError if it cannot be loaded, or does not begin within OPEN_S."""
        self._name = name
        self._password = password
        self._secret: Secret | None = None
        """As the plug-in has last got it."""
        self._is_closed = False
        self._idle: list[_Worker] = []
        self._driver: Driver = self._called("opening it", lambda: self._made(options), OPEN_S)

    def facts(self) -> Facts:
        told = self._called("facts", self._driver.facts, FACTS_S)
        if not isinstance(told, Facts) or not isinstance(told.kind, str) or not isinstance(told.version, str):
            raise self._wrong("facts", "Facts", told)
        return Facts(told.kind, told.version, told.evicts, tuple(str(warning) for warning in told.warnings))

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        asked = list(names)
        found = self._called(
            "starts", lambda: self._driver.starts(asked, most_bytes, within_s=within_s), within_s + GRACE_S
        )
        if not isinstance(found, list) or len(found) != len(names):
            raise self._wrong("starts", f"a list of {len(names)} answers", found)
        return [self._start(one, most_bytes) for one in found]

    def _start(self, told: object, most_bytes: int) -> Start | StoreError | None:
        match told:
            case None:
                return None
            case StoreError():
                return self._translated(told)
            case Start(beginning, int(size)) if isinstance(beginning, bytes | memoryview):
                if len(beginning) == min(size, most_bytes):
                    return Start(bytes(beginning), size)
                expected = f"the first {most_bytes} bytes, or all, of an object"
                return self._wrong("starts", expected, f"{len(beginning)} of {size}")
        return self._wrong("starts", "Start, StoreError or None", told)

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        own = [(offset, memoryview(bytearray(len(target)))) for offset, target in pieces]
        is_there = self._called("read", lambda: self._driver.read(name, own, within_s=within_s), within_s + GRACE_S)
        if not isinstance(is_there, bool):
            raise self._wrong("read", "True or False", is_there)
        if is_there:
            for (_, target), (_, came) in zip(pieces, own, strict=True):
                target[:] = came
        return is_there

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        own = [bytes(piece) for piece in pieces]
        is_first = self._called("create", lambda: self._driver.create(name, own, within_s=within_s), within_s + GRACE_S)
        if not isinstance(is_first, bool):
            raise self._wrong("create", "True or False", is_first)
        return is_first

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        self._called("replace", lambda: self._driver.replace(name, value, within_s=within_s), within_s + GRACE_S)

    def touch(self, name: str, *, within_s: float) -> None:
        self._called("touch", lambda: self._driver.touch(name, within_s=within_s), within_s + GRACE_S)

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        gone = list(names)
        self._called("remove", lambda: self._driver.remove(gone, within_s=within_s), within_s + GRACE_S)

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        lists = self._called(
            "listed", lambda: iter(self._driver.listed(beginning, within_s=within_s)), within_s + GRACE_S
        )
        while (some := self._called("listed", lambda: next(lists, None), within_s + GRACE_S)) is not None:
            if not isinstance(some, list) or not all(_is_named(one, beginning) for one in some):
                raise self._wrong("listed", f"lists of Named that begin with {beginning!r}", some)
            yield some

    def close(self) -> None:
        """Whatever comes of it: the process ends soon."""
        with suppress(StoreError):
            self._called("close", self._driver.close, CLOSE_S)
        with _COUNTING:
            self._is_closed = True
            for worker in self._idle:
                worker.runs.put(None)
            self._idle.clear()

    # ---------------------------------------------------------------- calls

    def _made(self, options: Mapping[str, str]) -> Driver:
        module, _, kind = self._name.partition(":")

        def revealed() -> str:
            self._secret = self._password.current() if self._password is not None else None
            return "" if self._secret is None else self._secret.reveal()

        driver: Driver = getattr(importlib.import_module(module), kind)(dict(options), revealed)
        return driver

    def _called(self, what: str, call: Callable[[], T], within_s: float) -> T:
        """The answer of a call on another thread. Raises StoreError, also when it does not end in time."""
        with _COUNTING:
            if _HUNG[self._name] >= HUNG_MAX:
                raise StoreError("remote-slow", f"{what}: {HUNG_MAX} calls of the plug-in hang", node=self._name)
            if self._is_closed:
                raise StoreError("remote-down", f"{what}: closed", node=self._name)
            worker = self._idle.pop() if self._idle else _Worker(self._is_idle)
        run = _Run(call)
        worker.runs.put(run)
        if not run.ended.wait(within_s):
            with _COUNTING:
                is_hung = not run.ended.is_set()
                run.is_hung = is_hung
                _HUNG[self._name] += is_hung
            if is_hung:
                raise StoreError("remote-slow", f"{what} has not ended after {within_s:g} s", node=self._name)
        if run.problem is not None:
            raise self._translated(run.problem)
        return run.answer

    def _is_idle(self, worker: "_Worker", run: "_Run[Any]") -> None:
        """A worker has ended a call."""
        with _COUNTING:
            run.ended.set()
            _HUNG[self._name] -= run.is_hung
            if self._is_closed:
                worker.runs.put(None)
            else:
                self._idle.append(worker)

    def _translated(self, problem: BaseException) -> StoreError:
        code: Problem = "remote-down"
        text = f"{type(problem).__name__}: {problem}"
        match problem:
            case StoreError() if problem.code in get_args(Problem):
                code, text = problem.code, problem.message  # type: ignore[assignment]  # one of them, as was just seen
            case TimeoutError():
                code = "remote-slow"
            case PermissionError():
                code = "remote-denied"
            case ConfigError():  # of the password
                code, text = "remote-denied", problem.message
        text = text if self._secret is None else self._secret.scrub(text)
        return StoreError(code, " ".join(text.split())[:TEXT_CHARS_MAX], node=self._name)

    def _wrong(self, what: str, expected: str, came: object) -> StoreError:
        said = came if isinstance(came, str) else type(came).__name__
        return StoreError("remote-down", f"{what} must give {expected}; it gave {said}", node=self._name)


class _Run(Generic[T]):
    """One call of a plug-in, and its end."""

    answer: T

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.problem: BaseException | None = None
        self.ended = threading.Event()
        self.is_hung = False
        """Nobody waits for its end any more."""


class _Worker:
    """A thread that carries out one call after the other, so that a plug-in may keep a connection for each thread."""

    def __init__(self, is_idle: Callable[["_Worker", _Run[Any]], None]) -> None:
        self.runs: queue.SimpleQueue[_Run[Any] | None] = queue.SimpleQueue()
        """None ends it."""
        self._is_idle = is_idle
        threading.Thread(target=self._work, name="plug-in", daemon=True).start()

    def _work(self) -> None:
        while (run := self.runs.get()) is not None:
            try:
                run.answer = run.call()
            except BaseException as problem:  # a plug-in raises anything, and its caller has to be told
                run.problem = problem.with_traceback(None)
            self._is_idle(self, run)
            run = None  # its buffers are not kept until the next call


def _is_named(told: object, beginning: str) -> bool:
    match told:
        case Named(str(name), int(size), int() | float()):
            return name.startswith(beginning) and size >= 0
    return False
