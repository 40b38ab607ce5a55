"""A Store in objects: one object for a chunk, one for a note, and logs of objects (docs/remote-format.md).

An object store has few and large requests: a chunk is one object, head first, written by one request that only the
first of two writers can do, and read by one or two. Notes lie apart from all else, so that a rule of the store can
remove old chunks and no note: a note that is lost counts as a Clear.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from kvserver.remote.chunk_value import (
    FORMAT,
    HEAD_BYTES_MAX,
    ChunkName,
    Head,
    NamespaceName,
    WrongValue,
    decode_of,
    digest_from_text,
    encode,
    epoch_from_text,
    head_bytes,
    text_of,
)
from kvserver.remote.namespace_note import NOTE_BYTES_MAX
from kvserver.remote.objects.driver import ChunkDriver, Driver, Named, Start
from kvserver.remote.objects.log import AnnouncementObjects
from kvserver.remote.store import Announced, Cursor, Facts, Gone, Listed, Sources, StoreError
from kvserver.tiers.records import NO_SUM

NOTES = f"kv{FORMAT}.notes"
TRIAL = f"kv{FORMAT}/.trial"
"""The folder in which it is tried what the store can do. No tenant has this name."""
OWN_TRIAL = f"{TRIAL}/{secrets.token_hex(16)}"
"""One for each process: a store that lets nothing be removed has few of them, and its error is always the same."""
_TRYING = threading.Lock()
ANNOUNCED = "announced"
LOGS_MAX = 256
"""Namespaces whose announcements are under way. What waits of the one that was used longest ago is forgotten."""
ASKED_FIRST_BYTES = 8 << 20
"""Whether a larger chunk is there is asked before it is sent."""
GONE = "is not there any more, or another write of it is"


class Waits(NamedTuple):
    """How long to wait for a store, in seconds."""

    probe_s: float = 1.0
    bulk_s: float = 10.0
    note_s: float = 2.0
    announced_every_s: float = 2.0
    """Announcements of a namespace are written and read no more often: each time is a request that is paid for."""


USUAL = Waits()


class Log(Protocol):
    """The announcements of one namespace. Calls may come from one thread at a time."""

    def append(self, epoch: int, batch: bytes) -> None: ...
    def read(self, epoch: int, after: Cursor | None) -> Announced: ...
    def drop(self, epoch: int) -> None: ...


class ObjectStore:
    """A Store over a driver (kvserver/remote/store.py)."""

    def __init__(
        self,
        driver: Driver,
        *,
        node: str,
        waits: Waits = USUAL,
        only_looks: bool = False,
        log: Callable[[str], Log] | None = None,
    ) -> None:
        """node: the place, as errors name it. Raises StoreError if the store cannot be asked, or lacks what is needed.

        only_looks: nothing is written there now. log: of announcements in a folder, where names cannot be listed."""
        self._driver = driver
        self._chunks = driver if isinstance(driver, ChunkDriver) else None
        self._node = node
        self._waits = waits
        self._logs: OrderedDict[NamespaceName, Log] = OrderedDict()
        self._new_log = log or self._listed_log
        if not only_looks:
            try:
                self._prove()
            except StoreError:
                driver.close()
                raise

    def facts(self) -> Facts:
        return self._driver.facts()

    def node_of(self, name: ChunkName) -> str:
        return self._node

    def nodes(self) -> frozenset[str]:
        return frozenset({self._node})

    def heads(self, names: Sequence[ChunkName], shards: int) -> list[Head | StoreError | WrongValue | None]:
        if not names:
            return []
        paths = [_path(name) for name in names]
        begins = self._driver.starts if self._chunks is None else self._chunks.first_pieces
        starts = begins(paths, head_bytes(shards), within_s=self._waits.probe_s)
        return [_head(name, start) for name, start in zip(names, starts, strict=True)]

    def read(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> list[int] | None:
        expected = encode(head)
        came = memoryview(bytearray(len(expected)))
        starts = accumulate((shard.payload_bytes for shard in head.shards), initial=len(expected))
        wanted = [(start, target) for start, target in zip(starts, targets, strict=False) if target is not None]
        pieces = [(0, came), *wanted]
        if self._chunks is not None:
            found = self._chunks.read_summed(_path(name), pieces, within_s=self._waits.bulk_s)
        else:
            found = [] if self._driver.read(_path(name), pieces, within_s=self._waits.bulk_s) else None
        if found is None or came != expected:
            raise Gone("remote-gone", GONE)
        if not found or any(summed != len(piece) for (_, summed), (_, piece) in zip(found, pieces, strict=True)):
            return None
        sums = (total for total, _ in found[1:])
        return [NO_SUM if target is None else next(sums) for target in targets]

    def write(self, name: ChunkName, head: Head, sources: Sources) -> bool:
        path = _path(name)
        if head.payload_bytes > ASKED_FIRST_BYTES and self._start(path, 1) is not None:
            return False
        return self._driver.create(path, [encode(head), *sources], within_s=self._waits.bulk_s)

    def touch(self, name: ChunkName, head: Head) -> None:
        self._driver.touch(_path(name), within_s=self._waits.note_s)

    def drop(self, name: ChunkName, head: Head | None) -> None:
        self._driver.remove([_path(name)], within_s=self._waits.note_s)

    def drop_listed(self, of: NamespaceName, values: Sequence[Listed]) -> None:
        paths = [_path(ChunkName(of, value.epoch, value.key, value.ranks)) for value in values]
        self._driver.remove(paths, within_s=self._waits.bulk_s)

    def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
        if not names:
            return []
        paths = [_note_path(name) for name in names]
        starts = self._driver.starts(paths, NOTE_BYTES_MAX, within_s=self._waits.note_s)
        failed = next((start for start in starts if isinstance(start, StoreError)), None)
        if failed is not None:
            raise failed
        return [bytes(start.beginning) if isinstance(start, Start) else None for start in starts]

    def make_note(self, name: NamespaceName, note: bytes) -> bool:
        return self._driver.create(_note_path(name), [note], within_s=self._waits.note_s)

    def replace_note(self, name: NamespaceName, note: bytes) -> None:
        self._driver.replace(_note_path(name), note, within_s=self._waits.note_s)

    def announce(self, of: NamespaceName, epoch: int, batch: bytes) -> None:
        self._log(of).append(epoch, batch)

    def announced(self, of: NamespaceName, epoch: int, after: Cursor | None) -> Announced:
        return self._log(of).read(epoch, after)

    def drop_announced(self, of: NamespaceName, epoch: int) -> None:
        self._log(of).drop(epoch)

    def look(self, name: ChunkName) -> Head | None:
        start = self._start(_path(name), HEAD_BYTES_MAX)
        found = _head(name, start)
        if isinstance(found, StoreError | WrongValue):
            raise found
        return found

    def namespaces(self, tenant: str) -> Iterator[list[NamespaceName]]:
        beginning = f"{NOTES}/{tenant}/"
        for some in self._driver.listed(beginning, within_s=self._waits.note_s):
            digests = [digest_from_text(one.name.removeprefix(beginning)) for one in some]
            yield [NamespaceName(tenant, digest) for digest in digests if digest is not None]

    def values(self, of: NamespaceName) -> Iterator[list[Listed]]:
        beginning = "/".join(of.pieces()) + "/"
        for some in self._driver.listed(beginning, within_s=self._waits.note_s):
            found = [_listed(one.name.removeprefix(beginning), one) for one in some]
            yield [value for value in found if value is not None]

    def close(self) -> None:
        self._driver.close()

    # ---------------------------------------------------------------- objects

    def _start(self, path: str, most_bytes: int) -> Start | None:
        (start,) = self._driver.starts([path], most_bytes, within_s=self._waits.note_s)
        if isinstance(start, StoreError):
            raise start
        return start

    def _log(self, of: NamespaceName) -> Log:
        if of in self._logs:
            self._logs.move_to_end(of)
        else:
            if len(self._logs) >= LOGS_MAX:
                self._logs.popitem(last=False)
            self._logs[of] = self._new_log("/".join((*of.pieces(), ANNOUNCED)) + "/")
        return self._logs[of]

    def _listed_log(self, folder: str) -> Log:
        return AnnouncementObjects(self._driver, folder, self._waits.note_s, every_s=self._waits.announced_every_s)

    def _prove(self) -> None:
        """Tries what a chunk needs, on an object of its own. Raises StoreError that says what the store cannot do."""
        with _TRYING:
            self._try(OWN_TRIAL)

    def _try(self, path: str) -> None:
        first, within_s = b"first", self._waits.note_s
        self._driver.remove([path], within_s=within_s)  # an earlier trial may have left it
        if not self._driver.create(path, [first], within_s=within_s):
            raise self._lacks("it says of an object that nobody has written that it is there")
        try:
            if self._driver.create(path, [b"second"], within_s=within_s):
                raise self._lacks("a write that is to create an object replaces it (If-None-Match: * does nothing)")
            came = memoryview(bytearray(len(first)))
            if not self._driver.read(path, [(0, came)], within_s=within_s) or came != first:
                raise self._lacks("an object that was written cannot be read at once")
        finally:
            self._driver.remove([path], within_s=within_s)
        if self._start(path, 1) is not None:
            raise self._lacks("an object that was removed is still there")

    def _lacks(self, what: str) -> StoreError:
        return StoreError("remote-refused", f"this store cannot be used: {what}", node=self._node)


def _path(name: ChunkName) -> str:
    key = text_of(name.key)
    last = f"{key}.{name.ranks}" if name.ranks else key
    return "/".join((*name.of.pieces(), f"{name.epoch:016x}", key[:2], last))


def _note_path(name: NamespaceName) -> str:
    return f"{NOTES}/{name.tenant}/{text_of(name.namespace)}"


def _head(name: ChunkName, start: Start | StoreError | None) -> Head | StoreError | WrongValue | None:
    if not isinstance(start, Start):
        return start
    try:
        head = decode_of(name, start.beginning)
    except WrongValue as problem:
        return problem.with_traceback(None)
    whole_bytes = len(encode(head)) + head.payload_bytes
    if start.bytes != whole_bytes:
        return WrongValue("short", f"has {start.bytes} bytes; expected {whole_bytes}")
    return head


def _listed(rest: str, one: Named) -> Listed | None:
    """A name without its namespace: EPOCH/KK/KEY[.RANKS]."""
    match rest.split("/"):
        case [epoch_text, _, last]:
            key_text, _, ranks = last.partition(".")
            epoch, key = epoch_from_text(epoch_text), digest_from_text(key_text)
            if epoch is not None and key is not None:
                return Listed(epoch, key, ranks, "", one.bytes, one.written_s)
    return None
