"""A driver that somebody else has written: loaded by its name, and kept from harming anything but itself.

Each call runs on a thread that nobody else needs, on memory of its own. So a plug-in that hangs costs its caller a
deadline and nothing else, and what it writes afterwards reaches nobody. Each answer is looked at: another shape or size
is an error. Whether bytes are the right ones, the digests of their head say. A plug-in that ends the process ends the
mover of its store, which the server starts again.
"""

import importlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, get_args

from kvserver.errors import ConfigError
from kvserver.remote.objects.driver import Driver, Named, Start
from kvserver.remote.secrets import CurrentSecret, Secret, safe_text
from kvserver.remote.store import Facts, Problem, StoreError

OPEN_S, FACTS_S, CLOSE_S = 10.0, 2.0, 1.0
GRACE_S = 0.5
"""A call may end so much later than it should."""
HUNG_MAX = 16
"""Calls that have not ended, of which nobody waits for the end. With so many the plug-in is not called any more."""
STUCK_S = 60.0
"""A process whose plug-in could not be called for so long should end: nothing else ends its threads."""
WARNINGS_MAX = 16
_HUNG: Counter[str] = Counter()
"""Name of a plug-in -> such calls of it in this process: a store that cannot be used is opened again and again."""
_OPENING: set[str] = set()
"""Plug-ins that are still being opened by a call that nobody waits for any more. No other such call begins."""
_REFUSED_SINCE_S: dict[str, float] = {}
"""Name of a plug-in -> since when it is not called, because too many calls of it hang."""
_COUNTING = threading.Lock()
T = TypeVar("T")


def stuck() -> str:
    """The name of a plug-in that could not be called for STUCK_S seconds; empty if there is none."""
    with _COUNTING:
        long_ago_s = time.monotonic() - STUCK_S
        return next((name for name, since_s in _REFUSED_SINCE_S.items() if since_s <= long_ago_s), "")


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
        with _COUNTING:
            if name in _OPENING:
                _REFUSED_SINCE_S.setdefault(name, time.monotonic())
                raise StoreError("remote-slow", "an earlier try of opening it has not ended", node=name)
        try:
            self._driver: Driver = self._called("opening it", lambda: self._made(options), OPEN_S, is_opening=True)
        except StoreError:
            self._end()
            raise

    def facts(self) -> Facts:
        def checked() -> Facts:
            match told := self._driver.facts():
                case Facts(str(kind), str(version), bool() | None as evicts, tuple() | list() as warnings):
                    said = tuple(self._shown(warning) for warning in warnings[:WARNINGS_MAX])
                    return Facts(self._shown(kind), self._shown(version), evicts, said)
            raise _WrongAnswer("facts", "Facts", told)

        return self._called("facts", checked, FACTS_S)

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        asked = list(names)

        def checked() -> list[Start | StoreError | None]:
            found = self._driver.starts(asked, most_bytes, within_s=within_s)
            if not isinstance(found, list) or len(found) != len(names):
                raise _WrongAnswer("starts", f"a list of {len(names)} answers", found)
            return [self._start(one, most_bytes) for one in found]

        return self._called("starts", checked, within_s + GRACE_S)

    def _start(self, told: object, most_bytes: int) -> Start | StoreError | None:
        try:
            match told:
                case None:
                    return None
                case StoreError():
                    return self._translated(told)
                case Start(bytes() | memoryview() as beginning, int(size)):
                    began = bytes(beginning)
                    if len(began) == min(size, most_bytes):
                        return Start(began, int(size))
                    expected = f"the first {most_bytes} bytes, or all, of an object"
                    raise _WrongAnswer("starts", expected, f"{len(began)} of {size}")
            raise _WrongAnswer("starts", "Start, StoreError or None", told)
        except Exception as problem:  # the other answers are taken
            return self._translated(problem)

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        own = [bytearray(len(target)) for _, target in pieces]

        def checked() -> bool:
            asked = [(offset, memoryview(came)) for (offset, _), came in zip(pieces, own, strict=True)]
            is_there = self._driver.read(name, asked, within_s=within_s)
            if not isinstance(is_there, bool):
                raise _WrongAnswer("read", "True or False", is_there)
            if [len(came) for came in own] != [len(target) for _, target in pieces]:
                raise _WrongAnswer("read", "memory as large as it was", "another size")
            return is_there

        is_there = self._called("read", checked, within_s + GRACE_S)
        if is_there:
            for (_, target), came in zip(pieces, own, strict=True):
                target[:] = came
        return is_there

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        own = [bytes(piece) for piece in pieces]

        def checked() -> bool:
            is_first = self._driver.create(name, own, within_s=within_s)
            if not isinstance(is_first, bool):
                raise _WrongAnswer("create", "True or False", is_first)
            return is_first

        return self._called("create", checked, within_s + GRACE_S)

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

        def checked() -> list[Named] | None:
            some = next(lists, None)
            if some is None:
                return None
            if not isinstance(some, list) or not all(_is_named(one, beginning) for one in some):
                raise _WrongAnswer("listed", f"lists of Named that begin with {beginning!r}", some)
            return some

        while (some := self._called("listed", checked, within_s + GRACE_S)) is not None:
            yield some

    def close(self) -> None:
        """Whatever comes of it: the process ends soon."""
        with suppress(StoreError):
            self._called("close", self._driver.close, CLOSE_S)
        self._end()

    def _end(self) -> None:
        """Its threads end, those that hang after their call."""
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

    def _called(self, what: str, call: Callable[[], T], within_s: float, *, is_opening: bool = False) -> T:
        """The answer of a call on another thread. Raises StoreError, also when it does not end in time."""
        with _COUNTING:
            if _HUNG[self._name] >= HUNG_MAX:
                _REFUSED_SINCE_S.setdefault(self._name, time.monotonic())
                raise StoreError("remote-slow", f"{what}: {HUNG_MAX} calls of the plug-in hang", node=self._name)
            if self._is_closed:
                raise StoreError("remote-down", f"{what}: closed", node=self._name)
            worker = self._idle.pop() if self._idle else _Worker(self._is_idle)
        run = _Run(call, is_opening=is_opening)
        worker.runs.put(run)
        if not run.ended.wait(within_s):
            with _COUNTING:
                is_hung = not run.ended.is_set()
                run.is_hung = is_hung
                _HUNG[self._name] += is_hung
                if is_hung and is_opening:
                    _OPENING.add(self._name)
            if is_hung:
                raise StoreError("remote-slow", f"{what} has not ended after {within_s:g} s", node=self._name)
        if run.problem is not None:
            raise run.problem
        return run.answer

    def _is_idle(self, worker: "_Worker", run: "_Run[Any]", problem: BaseException | None) -> None:
        """A worker has ended a call, with a problem or an answer."""
        run.problem = self._translated(problem) if problem is not None else None
        with _COUNTING:
            run.ended.set()
            _HUNG[self._name] -= run.is_hung
            is_late = run.is_hung and run.is_opening
            if is_late:
                _OPENING.discard(self._name)
            if self._name not in _OPENING and _HUNG[self._name] < HUNG_MAX:
                _REFUSED_SINCE_S.pop(self._name, None)
            if self._is_closed:
                worker.runs.put(None)
            else:
                self._idle.append(worker)
        if is_late and problem is None:
            with suppress(BaseException):  # nobody has it, and nobody hears of it
                run.answer.close()

    def _translated(self, problem: BaseException) -> StoreError:
        """Whatever a plug-in has raised, as an error of its store. Raises nothing: it reads what the plug-in made."""
        code: Problem = "remote-down"
        try:
            text = f"{type(problem).__name__}: {safe_text(problem, self._secret)}"
            match problem:
                case StoreError() if (own := getattr(problem, "code", None)) in get_args(Problem):
                    code = own  # type: ignore[assignment]  # one of them, as was just seen
                    text = getattr(problem, "message", text)
                case TimeoutError():
                    code = "remote-slow"
                case PermissionError():
                    code = "remote-denied"
                case ConfigError():  # of the password
                    code, text = "remote-denied", problem.message
                case _WrongAnswer():
                    text = str(problem)
            return StoreError(code, self._shown(text), node=self._name)
        except BaseException:  # it may raise anything there too
            return StoreError("remote-down", "an error that cannot be shown", node=self._name)

    def _shown(self, text: object) -> str:
        return safe_text(text, self._secret)


class _WrongAnswer(Exception):
    """A plug-in gave what the contract does not have."""

    def __init__(self, what: str, expected: str, came: object) -> None:
        said = came if type(came) is str else type(came).__name__
        super().__init__(f"{what} must give {expected}; it gave {said}")


class _Run(Generic[T]):
    """One call of a plug-in, and its end."""

    answer: T

    def __init__(self, call: Callable[[], T], *, is_opening: bool) -> None:
        self.call = call
        self.is_opening = is_opening
        self.problem: StoreError | None = None
        self.ended = threading.Event()
        self.is_hung = False
        """Nobody waits for its end any more."""


class _Worker:
    """A thread that carries out one call after the other, so that a plug-in may keep a connection for each thread."""

    def __init__(self, is_idle: Callable[["_Worker", _Run[Any], BaseException | None], None]) -> None:
        self.runs: queue.SimpleQueue[_Run[Any] | None] = queue.SimpleQueue()
        """None ends it."""
        self._is_idle = is_idle
        threading.Thread(target=self._work, name="plug-in", daemon=True).start()

    def _work(self) -> None:
        while (run := self.runs.get()) is not None:
            raised: BaseException | None = None
            try:
                run.answer = run.call()
            except BaseException as problem:  # a plug-in raises anything, and its caller has to be told
                raised = problem
            self._is_idle(self, run, raised)
            raised = None
            run = None  # its buffers are not kept until the next call


def _is_named(told: object, beginning: str) -> bool:
    match told:
        case Named(str(name), int(size), int() | float()):
            return name.startswith(beginning) and size >= 0
    return False
