"""Objects of a Mooncake Store, by its Python client (`pip install kvserver[mooncake]`, and the system's libibverbs1).

The client knows deadlines for the whole process alone, and a transfer to a data node that does not answer waits for
each piece of memory anew. So each piece is a call of its own here, and the first that fails ends the read or write.
The first contact with a data node that hangs has no deadline of ours: it takes 60 s.

It is a Driver (kvserver/remote/objects/driver.py) but for two things. It lists no names: the client cannot. And a
reader of an object that is replaced meanwhile may see two writes mixed: heads, payloads and notes have checks.
"""

import ctypes
import importlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from kvserver.remote.objects.driver import Named, Start
from kvserver.remote.objects.guessed_log import GuessedLog
from kvserver.remote.objects.store import USUAL, ObjectStore, Waits
from kvserver.remote.store import Facts, Problem, StoreError

SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Environment that the client reads once. Without it a call waits 30 s for a master or a data node that hangs."""
REACH_S = 0.3
"""For a connection to the master. The client takes 4 s to find out that nobody listens."""
STARTS_AT_A_TIME = 8
LOCAL_BYTES = 1 << 20
"""The client's own memory. We give it ours."""
SCRATCH_BYTES = 4 << 20
"""Memory that the client knows, for what lies elsewhere. A quarter of it costs a fifth of the rate: each is a call."""
WAITS = USUAL._replace(announced_every_s=0.2)
"""Nobody pays for a request here."""
AGAIN_S = 0.02
"""Until an object that another one writes is looked at again."""
NOTE_COPIES = 2
"""Copies of what must not be lost, on as many data nodes; fewer if there are fewer."""
NOBODYS = "-"
"""A name that no object has."""
ABSENT = (-703, -704)
"""Codes: it is not written to its end, or not there."""
EXISTS = -705
BUSY = -703
REFUSED = -600
ENDED = -700
UNREACHABLE = -900
CODES: dict[int, tuple[Problem, str]] = {
    -10: ("remote-full", "no memory is free"),
    -200: ("remote-full", "no data node has room, or there is none"),
    -600: ("remote-refused", "it does not take such a call"),
    -703: ("remote-slow", "another one is writing it"),
    -707: ("remote-slow", "the read took longer than the master keeps the object for it"),
    -800: ("remote-slow", "a data node did not answer"),
    -900: ("remote-down", "the master cannot be reached"),
    -901: ("remote-slow", "the master did not answer in time"),
}
"""Codes of the client, and what they mean. Others are "remote-down"."""
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError, OSError)
"""Errors that the client raises: those that pybind11 makes of C++'s, and those of a call that this release lacks or
that is answered in another shape."""
Transport = Literal["tcp", "rdma"]
T = TypeVar("T")
OPEN_PARTS = (
    "whoever reaches the two ports of the remote mover can read and change parts of chunks that are on their way, "
    "without a password: let only machines with data nodes reach them (docs/mooncake.md)"
)
OPEN_ARENA = (
    "whoever reaches the two ports of the remote mover can read and write the whole arena of this server without a "
    "password: let only machines with data nodes reach them (docs/mooncake.md)"
)
UNTRIED_RDMA = "RDMA is experimental: nobody has run it with kvserver"
PACKAGE = "mooncake-transfer-engine-non-cuda"
"""The build that we ask for. Others are looked for, which takes a second."""


class Place(NamedTuple):
    """A Mooncake Store, and how its bytes travel."""

    host: str
    port: int
    transport: Transport = "tcp"


class MooncakeObjects:
    """Objects of one store. Bytes pass through memory of its own, but those of an arena that it is given: the client
    opens that arena to whoever reaches its ports."""

    def __init__(self, place: Place, *, arena: memoryview | None = None, lasting: str = "") -> None:
        """lasting: the beginning of names of objects that the store must not evict. Raises StoreError."""
        self._place = place
        self._lasting = lasting
        self._is_unreachable = True
        self._idle: list[_Memory] = []
        self._lock = threading.Lock()
        self._reach()
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with self._guarded():
            try:
                library: Any = importlib.import_module("mooncake.store")
            except (ImportError, OSError) as problem:  # OSError: of libraries of the system
                text = f"its client cannot be loaded: {problem}"
                raise StoreError("remote-refused", text, node=self._node) from None
        segment_bytes = 0
        self._calls_under_way = 0
        self._is_closed = False
        with self._guarded():
            self._client = library.MooncakeDistributedStore()
            code = self._client.setup(
                self._own_host(), "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, place.transport, "", self._address
            )
            self._pinned = library.ReplicateConfig()
            self._pinned.with_hard_pin = True
            self._pinned.replica_num = NOTE_COPIES
            self._usual = library.ReplicateConfig()
        if code:
            raise StoreError("remote-down", f"the master takes no client (code {code})", node=self._node)
        self._arena = _Memory(arena) if arena is not None else None
        if self._arena is not None:
            self._register(self._arena)
        self._crew = ThreadPoolExecutor(STARTS_AT_A_TIME, thread_name_prefix="starts")

    def facts(self) -> Facts:
        with self._guarded():
            told = f"client {_version_of_client()}, over {self._place.transport}"
        is_open = OPEN_PARTS if self._arena is None else OPEN_ARENA
        warnings = (is_open, UNTRIED_RDMA) if self._place.transport == "rdma" else (is_open,)
        return Facts("mooncake", told, evicts=True, warnings=warnings)

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        due_s = time.monotonic() + within_s
        has_failed = threading.Event()
        ask = partial(self._start, most_bytes=most_bytes, due_s=due_s, has_failed=has_failed)
        sizes = self.sizes(names)
        try:
            return list(self._crew.map(ask, names, sizes)) if len(names) > 1 else list(map(ask, names, sizes))
        except (RuntimeError, CancelledError):  # the crew was sent away meanwhile
            raise StoreError("remote-down", "closed", node=self._node) from None

    def _start(
        self,
        name: str,
        size: int | StoreError | None,
        *,
        most_bytes: int,
        due_s: float,
        has_failed: threading.Event,
    ) -> Start | StoreError | None:
        if not isinstance(size, int):
            return size
        came = memoryview(bytearray(min(size, most_bytes)))
        try:
            if has_failed.is_set():  # each would wait for a second, and most lie on that node too
                raise StoreError("remote-slow", "another beginning did not come", node=self._node)
            return Start(came, size) if self._get(name, 0, came, due_s) else None
        except StoreError as problem:
            has_failed.set()
            return problem.with_traceback(None)

    def sizes(self, names: Sequence[str]) -> list[int | StoreError | None]:
        """The sizes of objects. None: not there. In two calls, however many they are, or four."""
        codes, copies = self._seen(names)
        if not copies and 1 in codes.values():  # the second call failed, or none is there any more
            again, copies = self._seen([name for name, code in codes.items() if code == 1])
            codes |= again
        return [self._size(codes[name], copies.get(name), vanishes=bool(copies)) for name in names]

    def _seen(self, names: Sequence[str]) -> tuple[dict[str, int], dict[str, Any]]:
        """Codes that say whether objects are there (1), and where those lie that are."""
        if not names:
            return {}, {}
        codes = self._ask(lambda: _codes(self._client.batch_is_exist(list(names)), len(names)))
        there = [name for name, code in zip(names, codes, strict=True) if code == 1]
        copies = self._ask(lambda: dict(self._client.batch_get_replica_desc(there))) if there else {}
        return dict(zip(names, codes, strict=True)), copies

    def _size(self, code: int, copies: Any, *, vanishes: bool) -> int | StoreError | None:
        """vanishes: the store told of others where they lie, so one of which it did not has gone meanwhile."""
        if code < 0 and code not in ABSENT:
            return self._error(code)
        if code != 1 or (copies is None and vanishes):
            return None
        if not copies:
            return StoreError("remote-slow", "it does not tell where an object lies", node=self._node)
        with self._guarded():
            if copies[0].is_memory_replica():
                return int(copies[0].get_memory_descriptor().buffer_descriptor.size)
        return StoreError("remote-refused", "an object lies on a disk of the store, which is not read", node=self._node)

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        """The first piece comes last. If it names the write, as a head does, the others are of that write too: nobody
        writes a chunk that is there."""
        due_s = time.monotonic() + within_s
        return all(self._get(name, offset, target, due_s) for offset, target in reversed(pieces))

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        due_s = time.monotonic() + within_s
        how = self._pinned if self._lasting and name.startswith(self._lasting) else self._usual
        total = sum(map(len, pieces))
        code = self._code(lambda: self._client.batch_put_session_start([name], [total], how))
        if code == REFUSED:  # the client keeps a write whose end the master has not answered
            if self._code(lambda: self._client.batch_put_session_revoke([name])) == ENDED:
                self._code(lambda: self._client.batch_put_session_end([name]))
            code = self._code(lambda: self._client.batch_put_session_start([name], [total], how))
        if code == EXISTS:
            return False
        if code:
            raise self._error(code)
        try:
            offset = 0
            for piece in pieces:
                self._put(name, offset, piece, due_s)
                offset += len(piece)
            code = self._code(lambda: self._client.batch_put_session_end([name]))
            if code:
                raise self._error(code)
        except StoreError:
            if not self._is_unreachable:
                with suppress(StoreError):
                    self._code(lambda: self._client.batch_put_session_revoke([name]))
            raise
        return True

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        """Between its two steps the object is not there: the client's own way writes over what readers see."""
        due_s = time.monotonic() + within_s
        while True:
            (code,) = self._remove([name])
            if code != BUSY and self.create(name, [value], within_s=within_s):
                return
            if time.monotonic() > due_s:
                raise StoreError("remote-slow", "others are writing it again and again", node=self._node)
            time.sleep(AGAIN_S)

    def touch(self, name: str, *, within_s: float) -> None:
        self._ask(lambda: self._client.batch_is_exist([name]))

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        for code in self._remove(names) if names else ():
            if code == BUSY:
                raise self._error(code)

    def _remove(self, names: Sequence[str]) -> list[int]:
        """Whatever reads are under way: their digests tell. Returns 0 or a code of ABSENT for each."""
        codes = self._ask(lambda: _codes(self._client.batch_remove(list(names), force=True), len(names)))
        failed = next((code for code in codes if code and code not in ABSENT), None)
        if failed is not None:
            raise self._error(failed)
        return codes

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        raise StoreError("remote-refused", "the client of Mooncake cannot list names", node=self._node)

    def close(self) -> None:
        """Calls that are under way end as they would. The last of them closes the client, which bears no call then."""
        self._crew.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            closes = not self._is_closed and not self._calls_under_way
            self._is_closed = True
        if closes:
            self._close_client()

    # ---------------------------------------------------------------- calls

    @property
    def _address(self) -> str:
        host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
        return f"{host}:{self._place.port}"

    @property
    def _node(self) -> str:
        return f"mooncake://{self._address}"

    def _get(self, name: str, offset: int, target: memoryview, due_s: float) -> bool:
        """Fills memory from an object. False: it is not there, or too short."""
        for memory, at, size in self._memory(target):
            self._check_time(due_s)
            place = [[[0]]], [[[offset + at]]], [[[size]]]
            code = self._ask(partial(self._got, [memory.address], [[name]], *place))
            if code in ABSENT or (code == REFUSED and self._is_shorter(name, offset + at + size)):
                return False
            if code != size:
                raise self._error(code, of_transfer=True)
            memory.give(target, at, size)
        return True

    def _got(self, *call: Any) -> int:
        (((code,),),) = self._client.get_into_ranges(*call)
        return int(code)

    def _is_shorter(self, name: str, end: int) -> bool:
        """Tells whether an object ends before. If it does not, a code that says so means a data node out of reach."""
        (size,) = self.sizes([name])
        if isinstance(size, StoreError):
            raise size
        return size is None or size < end

    def _put(self, name: str, offset: int, source: bytes | memoryview, due_s: float) -> None:
        for memory, at, size in self._memory(source):
            self._check_time(due_s)
            memory.take(source, at, size)
            place = [[memory.address]], [[size]], [[offset + at]]
            code = self._code(partial(self._client.batch_put_from_multi_buffer_ranges, [name], *place))
            if code != size:
                raise self._error(code, of_transfer=True)

    def _memory(self, view: bytes | memoryview) -> Iterator[tuple["_Memory", int, int]]:
        """Memory that the client knows, and which bytes of the view go through it: all at once, or bit by bit."""
        if self._arena is not None and (inside := self._arena.part(view)) is not None:
            yield inside, 0, len(view)
            return
        with self._scratch() as scratch:
            for at in range(0, len(view), SCRATCH_BYTES):
                yield scratch, at, min(SCRATCH_BYTES, len(view) - at)

    @contextmanager
    def _scratch(self) -> Iterator["_Memory"]:
        with self._lock:
            memory = self._idle.pop() if self._idle else None
        if memory is None:
            memory = _Memory(memoryview(mmap.mmap(-1, SCRATCH_BYTES)))
            self._register(memory)
        try:
            yield memory
        finally:
            with self._lock:
                self._idle.append(memory)

    def _register(self, memory: "_Memory") -> None:
        code = self._call(lambda: int(self._client.register_buffer(memory.address, memory.bytes)))
        if code:
            raise StoreError("remote-refused", f"the client does not take our memory (code {code})", node=self._node)

    def _code(self, call: Callable[[], Any]) -> int:
        """Asks for one object. Returns its code."""
        return self._ask(lambda: _codes(call(), 1)[0])

    def _ask(self, call: Callable[[], T]) -> T:
        if self._is_unreachable and not self._is_closed:
            self._reach()
            # The first call over a connection that the master has lost fails, although the master is there again.
            self._call(lambda: self._client.batch_is_exist([NOBODYS]))
        return self._call(call)

    def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            if self._is_closed:
                raise StoreError("remote-down", "closed", node=self._node)
            self._calls_under_way += 1
        try:
            with self._guarded():
                return call()
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._lock:
            self._calls_under_way -= 1
            closes = self._is_closed and not self._calls_under_way
        if closes:
            self._close_client()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Errors of the client, and answers in another shape, become errors of the store, and do not end the mover."""
        try:
            yield
        except StoreError:
            raise
        except ERRORS as problem:
            text = f"its client failed: {type(problem).__name__}"
            raise StoreError("remote-down", text, node=self._node) from None

    def _close_client(self) -> None:
        with suppress(StoreError), self._guarded():
            self._client.close()

    def _reach(self) -> None:
        """Raises StoreError if nobody takes a connection for the master."""
        try:
            socket.create_connection((self._place.host, self._place.port), timeout=REACH_S).close()
        except (OSError, UnicodeError) as problem:  # UnicodeError: the name can be none of a machine
            slow = isinstance(problem, TimeoutError)
            code: Problem = "remote-slow" if slow else "remote-down"
            raise StoreError(code, f"the master takes no connection: {problem}", node=self._node) from None
        self._is_unreachable = False

    def _own_host(self) -> str:
        """The address by which the master's side sees this machine. Nothing is sent."""
        family = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((self._place.host, self._place.port))
            return str(towards.getsockname()[0])

    def _check_time(self, due_s: float) -> None:
        if time.monotonic() > due_s:
            raise StoreError("remote-slow", "it takes too long", node=self._node)

    def _error(self, code: int, *, of_transfer: bool = False) -> StoreError:
        self._is_unreachable |= code == UNREACHABLE
        problem, text = CODES.get(code, ("remote-down", "an error of its client"))
        if of_transfer and code == REFUSED:
            problem, text = "remote-slow", "a data node cannot be reached"
        return StoreError(problem, f"{text} (code {code})", node=self._node)


def mooncake_store(
    objects: MooncakeObjects, *, node: str, waits: Waits = WAITS, only_looks: bool = False
) -> ObjectStore:
    """A Store in these objects. Raises StoreError, as ObjectStore does."""

    def log(folder: str) -> GuessedLog:
        return GuessedLog(objects, folder, waits.note_s, every_s=waits.announced_every_s)

    return ObjectStore(objects, node=node, waits=waits, only_looks=only_looks, log=log)


def _codes(answer: Any, count: int) -> list[int]:
    """The client's codes for so many objects. Raises if it answered otherwise."""
    codes = [int(code) for code in answer]
    if len(codes) != count:
        raise ValueError(f"{len(codes)} codes for {count} objects")
    return codes


def _version_of_client() -> str:
    """The version, if the client came as a package. One that was built from its source may have none."""
    from importlib import metadata  # noqa: PLC0415 - each start of a server would load all that reads e-mail for it

    with suppress(metadata.PackageNotFoundError, LookupError):
        return metadata.version(PACKAGE)
    with suppress(metadata.PackageNotFoundError, LookupError):
        return metadata.version(metadata.packages_distributions()["mooncake"][0])
    return "of an unknown version"


class _Memory:
    """Memory that the client knows."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.bytes = len(view)
        self.address = _address_of(view)

    def part(self, view: bytes | memoryview) -> "_Part | None":
        """The view, if it lies inside."""
        if isinstance(view, bytes) or view.readonly or not len(view):
            return None
        address = _address_of(view)
        is_inside = self.address <= address and address + len(view) <= self.address + self.bytes
        return _Part(address) if is_inside else None

    def take(self, source: bytes | memoryview, at: int, size: int) -> None:
        self._view[:size] = source[at : at + size]

    def give(self, target: memoryview, at: int, size: int) -> None:
        target[at : at + size] = self._view[:size]


class _Part(_Memory):
    """A caller's memory itself. There is nothing to copy."""

    def __init__(self, address: int) -> None:
        self.address = address

    def take(self, source: bytes | memoryview, at: int, size: int) -> None:
        pass

    def give(self, target: memoryview, at: int, size: int) -> None:
        pass


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
