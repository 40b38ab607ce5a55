"""`kvserver remote inspect`, `clear` and `sweep` without a server: what a store has, asked from the store itself.

Looking changes nothing there and counts as no use. Lists are bounded, because a store may have many millions of names.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError
from kvserver.movers.remote_checks import sums_of, wrong_sums
from kvserver.movers.remote_store import check, open_store
from kvserver.remote import namespace_note
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, WrongValue, fragments_of
from kvserver.remote.namespace_note import NamespaceNote
from kvserver.remote.store import Gone, Listed, Store
from kvserver.tiers.records import NamespaceDocument, decode_document
from kvserver.units import duration, show_bytes

DIGEST_DIGITS = 64
SHOWN_MAX = 8
"""Namespaces that an error names."""
NOTES_AT_A_TIME = 256

Say = Callable[[str], None]
"""Prints one line."""
T = TypeVar("T")


class Bounds(NamedTuple):
    """How much is listed."""

    names: int
    within_s: float


class Content:
    """Sums of what was listed, of one or several epochs."""

    def __init__(self) -> None:
        self.epochs: set[int] = set()
        self.chunks = self.values = self.bytes = 0

    def add(self, value: Listed) -> None:
        self.epochs.add(value.epoch)
        self.chunks += not value.fragment
        self.values += 1
        self.bytes += value.bytes

    def __str__(self) -> str:
        return f"{self.chunks:,} chunks, {self.values:,} values, {self.bytes:,} bytes"


@contextmanager
def opened(remote: Remote) -> Iterator[Store]:
    """The store, opened to look at it; a note may be written all the same. Raises ConfigError or StoreError."""
    check(remote)
    store = open_store(remote, only_looks=True)
    try:
        yield store
    finally:
        store.close()


def all_namespaces(store: Store, remote: Remote) -> list[bytes]:
    """The digests of all namespaces that have a note, in order. Raises StoreError."""
    return sorted({name.namespace for some in store.namespaces(remote.tenant) for name in some})


def clear(store: Store, remote: Remote, namespaces: Sequence[bytes]) -> int:
    """Writes a fresh epoch into the note of each namespace. Returns how many.

    Raises ConfigError for one without a note, or StoreError; those before it are cleared then."""
    for digest in namespaces:
        name = NamespaceName(remote.tenant, digest)
        (packed,) = store.notes([name])
        if packed is None:
            text = (
                f"{remote.name} has no note of {digest.hex()} for tenant {remote.tenant!r}, so no server finds chunks"
            )
            raise ConfigError("remote-namespace", f"{text} of it; `kvserver remote inspect` lists those with a note")
        known = namespace_note.decode(packed, name)
        document = known.document if known is not None else b""
        store.replace_note(name, namespace_note.encode(NamespaceNote(secrets.randbits(64), document), name))
    return len(namespaces)


class Sweep(NamedTuple):
    """The content that a sweep has removed, or would remove."""

    content: Content
    ended: str
    """Why it ended early; empty if it did not."""


def sweep(
    store: Store,
    remote: Remote,
    namespaces: Sequence[bytes],
    *,
    bounds: Bounds,
    values_per_s: float,
    only_looks: bool,
    unused_since_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Sweep:
    """Removes what namespaces have of epochs that no server finds any more, and what was not used since a time.

    Raises ConfigError if the store does not tell that, or StoreError; what came before it is removed then.

    The note is read again before each removal, and removals are slow on purpose: servers use the store meanwhile.
    A namespace without a note is left alone, for a server may be about to write one."""
    content = Content()
    due_s = time.monotonic() + bounds.within_s
    for digest in namespaces:
        name = NamespaceName(remote.tenant, digest)
        for some in store.values(name):
            note = namespace_note.decode(store.notes([name])[0], name)
            if note is None:
                break
            old = [value for value in some if value.epoch != note.epoch or _is_unused(value, unused_since_s)]
            old = old[: bounds.names - content.values]
            if old and not only_looks:
                store.drop_listed(name, old)
                sleep(len(old) / values_per_s)
            for value in old:
                content.add(value)
            if content.values >= bounds.names:
                return Sweep(content, f"after {bounds.names:,} names (--limit)")
            if time.monotonic() > due_s:
                return Sweep(content, f"after {bounds.within_s:g} s (--within)")
    return Sweep(content, "")


def _is_unused(value: Listed, since_s: float | None) -> bool:
    if since_s is None:
        return False
    if value.used_s is None:
        raise ConfigError(
            "option", "--older-than: this store does not tell when a chunk was used; it drops old ones itself"
        )
    return value.used_s < since_s


class Look:
    """One look at a store."""

    def __init__(self, store: Store, remote: Remote, bounds: Bounds, say: Say) -> None:
        self._store = store
        self._remote = remote
        self._bounds = bounds
        self._say = say
        self._due_s = time.monotonic() + bounds.within_s
        self._ended = ""
        """Why a list was ended early; empty if it was not."""

    def namespaces(self) -> None:
        """Prints a line for each namespace that has a note. Raises StoreError."""
        self._say(f"{self._remote.name} at {self._remote.url}, tenant {self._remote.tenant}")
        digests = self._listed_namespaces()
        for first in range(0, len(digests), NOTES_AT_A_TIME):
            some = digests[first : first + NOTES_AT_A_TIME]
            names = [self._name(digest) for digest in some]
            for name, packed in zip(names, self._store.notes(names), strict=True):
                self._say(f"namespace {name.namespace.hex()}: {_said_of(name, packed)[1]}")
        self._say(f"{self._at_least()}{len(digests):,} namespaces")

    def namespace(self, beginning: str) -> None:
        """Prints what one namespace has, of the epoch that counts and of others. Raises ConfigError or StoreError."""
        name = self._name(self._digest(beginning))
        (packed,) = self._store.notes([name])
        note, said = _said_of(name, packed)
        self._say(f"namespace {name.namespace.hex()}: {said}")
        if note is not None and (document := decode_document(note.document)) is not None:
            for line in _groups(document):
                self._say(line)
        current, others = Content(), Content()
        for value in self._bounded(self._store.values(name)):
            (current if note is not None and value.epoch == note.epoch else others).add(value)
        self._say(f"  of this epoch: {self._at_least()}{current}")
        self._say(f"  of {len(others.epochs):,} other epochs, which no server finds: {self._at_least()}{others}")

    def chunk(self, beginning: str, key: bytes) -> bool:
        """Prints the head of a chunk and compares its bytes. False if it is not there or wrong. Raises ConfigError or
        StoreError."""
        name = self._name(self._digest(beginning))
        (packed,) = self._store.notes([name])
        note, said = _said_of(name, packed)
        if note is None:
            self._say(f"namespace {name.namespace.hex()}: {said}")
            return False
        chunk = ChunkName(name, note.epoch, key)
        try:
            head = self._store.look(chunk)
        except WrongValue as wrong:
            self._say(f"chunk {key.hex()}: what has its name {wrong.message}")
            return False
        if head is None:
            self._say(f"chunk {key.hex()}: not there, in epoch {note.epoch:016x}")
            return False
        return self._say_of(chunk, head)

    def _say_of(self, name: ChunkName, head: Head) -> bool:
        written = duration(max(0.0, time.time() - head.written_s))
        self._say(
            f"chunk {name.key.hex()}: {len(head.shards):,} parts, {head.payload_bytes:,} bytes, epoch {head.epoch:016x}"
        )
        self._say(f"  written {written} ago by its writer's clock, as write {head.write:016x}")
        self._say(f"  follows {head.parent.hex()}" if any(head.parent) else "  the first of its chain")
        if head.fragment_bytes:
            count = sum(1 for _ in fragments_of(head))
            self._say(f"  {count:,} fragments of at most {show_bytes(head.fragment_bytes)}")
        verdicts = [self._verdict(name, head, index) for index in range(len(head.shards))]
        for shard, verdict in zip(head.shards, verdicts, strict=True):
            self._say(
                f"  group {shard.group}, shard {shard.shard}: {shard.payload_bytes:,} bytes, {verdict or 'right'}"
            )
        return not any(verdicts)

    def _verdict(self, name: ChunkName, head: Head, wanted: int) -> str:
        """The fault of one part; empty if its bytes have their digest. Parts are read one by one, to spare memory."""
        payload = memoryview(bytearray(head.shards[wanted].payload_bytes))
        targets = [payload if index == wanted else None for index in range(len(head.shards))]
        try:
            sums = self._store.read(name, head, targets) or sums_of(targets)
        except Gone as gone:
            return gone.message
        return "other bytes than their digest says" if wrong_sums(name, head, sums) else ""

    # ---------------------------------------------------------------- lists

    def _name(self, digest: bytes) -> NamespaceName:
        return NamespaceName(self._remote.tenant, digest)

    def _digest(self, beginning: str) -> bytes:
        """The namespace that begins so. Raises ConfigError if none does, or several."""
        if not re.fullmatch(f"[0-9a-f]{{1,{DIGEST_DIGITS}}}", beginning):
            expected = f"1 to {DIGEST_DIGITS} lower-case hexadecimal digits"
            raise ConfigError("remote-namespace", f"{beginning[:80]!r} must be {expected}")
        if len(beginning) == DIGEST_DIGITS:
            return bytes.fromhex(beginning)
        found = [digest for digest in self._listed_namespaces() if digest.hex().startswith(beginning)]
        if len(found) != 1:
            names = ", ".join(digest.hex() for digest in found[:SHOWN_MAX])
            which = f"{len(found):,} begin so: {names}" if found else "none begins so"
            early = f"; the list was ended {self._ended}" if self._ended else ""
            raise ConfigError(
                "remote-namespace", f"{beginning!r} must be the beginning of one namespace; {which}{early}"
            )
        return found[0]

    def _listed_namespaces(self) -> list[bytes]:
        return sorted(name.namespace for name in self._bounded(self._store.namespaces(self._remote.tenant)))

    def _bounded(self, lists: Iterable[Sequence[T]]) -> Iterator[T]:
        """Each value once, until one of the bounds is reached."""
        seen: set[T] = set()
        for some in lists:
            for value in some:
                if value in seen:
                    continue
                if len(seen) == self._bounds.names:
                    self._ended = f"after {self._bounds.names:,} names (--limit)"
                    return
                seen.add(value)
                yield value
            if time.monotonic() > self._due_s:
                self._ended = f"after {self._bounds.within_s:g} s (--within)"
                return

    def _at_least(self) -> str:
        return f"ended {self._ended}; at least " if self._ended else ""


def _said_of(name: NamespaceName, packed: bytes | None) -> tuple[NamespaceNote | None, str]:
    """A namespace's note, and what it says in words."""
    note = namespace_note.decode(packed, name)
    if note is None:
        why = "without a note" if packed is None else "its note is damaged"
        return None, f"{why}: no server finds its chunks, and the next that uses it begins a fresh epoch"
    document = decode_document(note.document)
    if document is None:
        return note, f"epoch {note.epoch:016x}, nothing is known of its chunks"
    return note, f"epoch {note.epoch:016x}, chunks of {document.chunk_tokens:,} tokens, {len(document.groups)} groups"


def _groups(document: NamespaceDocument) -> Iterator[str]:
    for number, group in enumerate(document.groups):
        window = f" of {group.window_tokens:,} tokens" if group.window_tokens else ""
        yield (
            f"  group {number}: {group.kind}{window}, blocks of {group.block_tokens:,} tokens, {group.shards:,} shards"
        )
