"""Valkey and Redis, standalone or as a cluster, by the library valkey-glide-sync (`pip install kvserver[valkey]`).

A small chunk is one value: its head, then its payloads. A large one has its payloads in fragments, in the hash slot of
their head. Fragments are written first and live longer than the head, so a head comes last and goes first.

Connections are of several kinds, because a server answers each connection in order: probes must not wait behind
payloads. Each kind has its deadline. A client that cannot connect is made anew at the next call; one that was connected
connects again by itself.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from glide_shared import exceptions as glide
from glide_shared.commands.batch import Batch, ClusterBatch
from glide_shared.commands.core_options import ConditionalChange, ExpirySet, ExpiryType, InfoSection
from glide_shared.commands.stream import ExclusiveIdBound, MaxId, MinId, StreamAddOptions, TrimByMaxLen
from glide_shared.config import (
    AdvancedGlideClientConfiguration,
    AdvancedGlideClusterClientConfiguration,
    BackoffStrategy,
    GlideClientConfiguration,
    GlideClusterClientConfiguration,
    NodeAddress,
    ServerCredentials,
    TlsAdvancedConfiguration,
)
from glide_shared.constants import TEncodable
from glide_shared.exceptions import GlideError
from glide_shared.logger import Level, Logger
from glide_shared.routes import AllNodes
from glide_sync import ClusterScanCursor, GlideClient, GlideClusterClient, glide_client

from kvserver.errors import ConfigError
from kvserver.remote.chunk_value import (
    FORMAT,
    HEAD_BYTES_MAX,
    ChunkName,
    Fragment,
    Head,
    NamespaceName,
    WrongValue,
    decode_of,
    digest_from_text,
    encode,
    epoch_from_text,
    fragments_of,
    head_bytes,
    text_of,
)
from kvserver.remote.secrets import CurrentSecret, Secret, SecretSource
from kvserver.remote.store import Announced, Cursor, Facts, Gone, Listed, Problem, Sources, StoreError, WrongSource
from kvserver.remote.valkey_answers import (
    MARKS_FIELD,
    OutOfStepError,
    bytes_of,
    id_order,
    listed_answers,
    number_of,
    stream_entries,
)
from kvserver.remote.valkey_nodes import NodeMap, info_of, node_map, version_of
from kvserver.tiers.records import NO_SUM
from kvserver.transfer.native import digest_copy

# It writes warnings to standard error otherwise, with addresses and without our format.
Logger.set_logger_config(Level.OFF)


class _Os:
    """`os` for the library, without the hook that keeps every client for ever and connects it in each forked child."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def register_at_fork(self, **_: object) -> None:
        """Nobody forks with a store that is open."""


vars(glide_client)["os"] = _Os()

FRAGMENTS_OUTLIVE_S = 60
"""Seconds that fragments live longer than their head, so that no head is left behind without them."""
RECONNECT = BackoffStrategy(num_of_retries=4, factor=100, exponent_base=2, jitter_percent=20)
"""Waits between tries to connect again: 0.1 s, doubling up to 1.6 s, then always 1.6 s."""
NODES_ASKED_EVERY_S = 10.0
REPLY_BYTES_MAX = 4 << 20
"""Bytes of several fragments that are asked for together."""
ASKED_FIRST_BYTES = 8 << 20
"""Whether a larger chunk is there is asked before it is sent. A smaller one is sent at once: asking takes as long."""
WRITES = 2
"""Writes under way on one connection: while one is sent, the library takes in the next one."""
SCRATCH_BYTES = 1 << 20
"""A thread's room for values that are head and payloads together. It grows for larger ones."""
IDLE_READS = 32
"""After so many reads of announcements that brought nothing it is asked whether the log was begun anew."""
LATE_MAX = 3
"""Calls in a row that pass their deadline until a connection is made anew. The library keeps one that lost its peer."""
SCANNED_AT_A_TIME = 1000
"""Names that a server looks at in one call: it serves nobody else meanwhile, for about a millisecond."""
BATCHES_MAX = 1 << 18
"""Batches of announcements that a namespace keeps, about."""
BATCHES_AT_A_TIME = 512
Kind = Literal["probe", "read", "write", "commit", "note", "announce"]
Client = GlideClient | GlideClusterClient
Scrub = Callable[[str], str]
Failure = TypeVar("Failure", bound=Exception)
WRONG_TYPE = "WRONGTYPE"
GLOB = "\\*?[]^"
"""Letters that a pattern of SCAN takes for something else than themselves."""
MEANINGS: dict[str, Problem] = {
    "OOM": "remote-full",
    "MISCONF": "remote-full",
    "NOPERM": "remote-denied",
    "PermissionDenied": "remote-denied",
    "NOAUTH": "remote-denied",
    "WRONGPASS": "remote-denied",
    "AuthenticationFailed": "remote-denied",
    "READONLY": "remote-down",
    "LOADING": "remote-down",
    "MASTERDOWN": "remote-down",
    "CLUSTERDOWN": "remote-down",
    "Moved: ": "remote-down",  # to a node that cannot be reached
    "TRYAGAIN": "remote-down",
    "BUSY ": "remote-slow",
}
"""Words in an error, of a server or of the library, and what they mean."""


class Settings(NamedTuple):
    """How to reach a Valkey, and how long to wait for it. Times in seconds."""

    addresses: tuple[tuple[str, int], ...]
    is_cluster: bool = False
    uses_tls: bool = False
    ca_file: str = ""
    """Certificates that the server's must come from; empty: those of the machine."""
    username: str = ""
    password: SecretSource | None = None
    prefix: str = ""
    """The beginning of all names, before the format's own."""
    ttl_s: int = 86_400
    """A chunk that is not used for so long is dropped by the server."""
    probe_s: float = 0.05
    bulk_s: float = 5.0
    note_s: float = 2.0
    connect_s: float = 1.0
    connections: int = 4
    """Connections that bring payloads, as many that take them out, and as many for the heads of those, each to every
    node."""


class ValkeyStore:
    """A Store in a Valkey or Redis (kvserver/remote/store.py)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        host, port = settings.addresses[0]
        self._address = f"{host}:{port}"
        self._scratch = _Scratch()
        self._nodes = NodeMap()
        self._nodes_asked_s = -NODES_ASKED_EVERY_S
        self._password = password = CurrentSecret(settings.password) if settings.password is not None else None
        self._lanes = {
            "probe": _Lane(settings, password, settings.probe_s, 2, waits_s=settings.probe_s),
            "read": _Lane(settings, password, settings.bulk_s, settings.connections, waits_s=None),
            "write": _Lane(settings, password, settings.bulk_s, settings.connections, waits_s=None, calls=WRITES),
            "commit": _Lane(settings, password, settings.bulk_s, settings.connections, waits_s=None),
            "note": _Lane(settings, password, settings.note_s, 1, waits_s=settings.note_s),
            "announce": _Lane(settings, password, settings.note_s, 1, waits_s=settings.note_s),
        }

    def facts(self) -> Facts:
        with self._connection("note") as to:
            told = to.client.info([InfoSection.SERVER, InfoSection.MEMORY])
            nodes = list(told.values()) if isinstance(told, dict) else [told]
            found = [info_of(bytes_of(node) or b"") for node in nodes]
        policies = sorted({node.get("maxmemory_policy", "unknown") for node in found})
        bounded = all(node.get("maxmemory", "").strip("0") for node in found)
        warnings = []
        if "noeviction" in policies:
            warnings.append("maxmemory-policy is noeviction: writes fail when it is full; expected allkeys-lru")
        if not bounded:
            warnings.append("maxmemory is 0: it grows until its machine has no memory left")
        version = sorted({version_of(node) for node in found})
        return Facts("valkey", ", ".join(version), "noeviction" not in policies and bounded, tuple(warnings))

    def node_of(self, name: ChunkName) -> str:
        return self._nodes.node_of(self._key(name)) if self._settings.is_cluster else self._address

    def nodes(self) -> frozenset[str]:
        return self._nodes.names if self._settings.is_cluster else frozenset({self._address})

    def heads(self, names: Sequence[ChunkName], shards: int) -> list[Head | StoreError | WrongValue | None]:
        if not names:
            return []
        last = head_bytes(shards) - 1
        with self._connection("probe") as to:
            self._learn_nodes(to)
            batch = self._batch()
            for name in names:
                batch.getrange(self._key(name), 0, last)
            answers = self._exec(to, batch, len(names))
            found = [_head(name, answer, to.scrub) for name, answer in zip(names, answers, strict=True)]
            in_fragments = [
                (index, head) for index, head in enumerate(found) if isinstance(head, Head) and head.fragment_bytes
            ]
            if in_fragments:
                self._check_fragments(to, names, found, in_fragments)
        return found

    def _check_fragments(
        self,
        to: "_Connection",
        names: Sequence[ChunkName],
        found: list[Head | StoreError | WrongValue | None],
        in_fragments: list[tuple[int, Head]],
    ) -> None:
        """Replaces heads whose fragments are not all there by None, and drops them: they would keep the chunk out."""
        batch = self._batch()
        keys = [self._renew(batch, names[index], head) for index, head in in_fragments]
        answers = iter(self._exec(to, batch, sum(keys)))
        dangling = self._batch()
        count = 0
        for (index, _), of_one in zip(in_fragments, keys, strict=True):
            of_head = list(islice(answers, of_one))
            failed = next((answer for answer in of_head if isinstance(answer, GlideError)), None)
            if failed is not None:
                found[index] = _translated(failed, to.scrub)
            elif not all(of_head):
                found[index] = None
                dangling.unlink([self._key(names[index])])
                count += 1
        if count:
            with suppress(GlideError):
                self._exec(to, dangling, count)

    def read(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> list[int] | None:
        if not head.fragment_bytes:
            return self._read_value(name, head, targets)
        with self._connection("read") as to:
            self._read_fragments(to, name, head, targets)
        return None

    def _read_value(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> list[int]:
        expected = encode(head)
        whole = self._scratch.room(len(expected) + head.payload_bytes)
        with self._connection("read") as to:
            try:
                count = number_of(to.client.get(self._key(name), buffer=whole))
            except glide.RequestError as problem:
                if "exceeds buffer" in str(problem):
                    raise Gone("remote-gone", "another write of it is there") from _without_frames(problem)
                raise
        if count != len(whole) or whole[: len(expected)] != expected:
            raise Gone("remote-gone", "is not there any more, or another write of it is")
        starts = accumulate((shard.payload_bytes for shard in head.shards), initial=len(expected))
        return [
            NO_SUM if target is None else digest_copy(whole[start : start + len(target)], target, 0)[0]
            for target, start in zip(targets, starts, strict=False)
        ]

    def _read_fragments(
        self, to: "_Connection", name: ChunkName, head: Head, targets: Sequence[memoryview | None]
    ) -> None:
        wanted = ((fragment, targets[fragment.shard]) for fragment in fragments_of(head))
        for group in _gathered([(fragment, target) for fragment, target in wanted if target is not None]):
            keys: list[TEncodable] = [self._fragment_key(name, head, fragment) for fragment, _ in group]
            views = [target[fragment.offset : fragment.offset + fragment.bytes] for fragment, target in group]
            try:
                counts = to.client.mget(keys, buffers=views)
            except glide.RequestError as problem:
                if "exceeds buffer" in str(problem):
                    raise Gone("remote-gone", "a fragment has another size") from _without_frames(problem)
                raise
            found = [number_of(count) for count in listed_answers(counts, len(views))]
            if found != [len(view) for view in views]:
                raise Gone("remote-gone", "a fragment is not there any more")

    def write(self, name: ChunkName, head: Head, sources: Sources) -> bool:
        key = self._key(name)
        if not head.fragment_bytes:
            value = self._gather(head, sources)
            with self._connection("write") as to:
                return self._set_new(to, key, value)
        if head.payload_bytes > ASKED_FIRST_BYTES:
            with self._connection("commit") as to:
                if to.client.exists([key]):
                    return False
        with self._connection("write") as to:
            written = self._write_fragments(to, name, head, sources)
        # If this fails, it may have happened all the same. Fragments without a head expire; a head without them is
        # found out.
        with self._connection("commit") as to:
            is_first = self._set_new(to, key, encode(head))
            if not is_first:
                to.client.unlink(written)
            return is_first

    def _write_fragments(self, to: "_Connection", name: ChunkName, head: Head, sources: Sources) -> list[TEncodable]:
        """Writes all fragments, or none that stays. Returns their keys."""
        lives = ExpirySet(ExpiryType.SEC, self._settings.ttl_s + FRAGMENTS_OUTLIVE_S)
        written: list[TEncodable] = []
        try:
            for fragment in fragments_of(head):
                payload = sources[fragment.shard][fragment.offset : fragment.offset + fragment.bytes]
                written.append(self._fragment_key(name, head, fragment))
                to.client.set(written[-1], payload, expiry=lives)
        except (GlideError, WrongSource) as problem:
            if not isinstance(problem, glide.TimeoutError):  # it would take another deadline, and fragments expire
                with suppress(GlideError):
                    to.client.unlink(written)
            raise
        return written

    def touch(self, name: ChunkName, head: Head) -> None:
        with self._connection("probe") as to:
            batch = self._batch()
            keys = self._renew(batch, name, head)
            for answer in self._exec(to, batch, keys):
                if isinstance(answer, GlideError):
                    raise _translated(answer, to.scrub)

    def drop(self, name: ChunkName, head: Head | None) -> None:
        with self._connection("probe") as to:
            to.client.unlink([self._key(name)] if head is None else self._keys(name, head))

    def drop_listed(self, of: NamespaceName, values: Sequence[Listed]) -> None:
        if not values:
            return
        with self._connection("note") as to:
            batch = self._batch()
            for value in values:
                key = self._key(ChunkName(of, value.epoch, value.key, value.ranks))
                batch.unlink([b"%s:%s" % (key, value.fragment.encode()) if value.fragment else key])
            for answer in self._exec(to, batch, len(values)):
                if isinstance(answer, GlideError):
                    raise _translated(answer, to.scrub)

    def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
        with self._connection("note") as to:
            answer = to.client.mget([self._note_key(name) for name in names]) if names else []
            return [bytes_of(note) for note in listed_answers(answer, len(names))]

    def make_note(self, name: NamespaceName, note: bytes) -> bool:
        with self._connection("note") as to:
            made = to.client.set(self._note_key(name), note, conditional_set=ConditionalChange.ONLY_IF_DOES_NOT_EXIST)
            if made is None:
                to.client.get(self._note_key(name))  # an error for a value of another type, which notes() reads as none
            return made is not None

    def replace_note(self, name: NamespaceName, note: bytes) -> None:
        with self._connection("note") as to:
            to.client.set(self._note_key(name), note)

    def announce(self, of: NamespaceName, epoch: int, batch: bytes) -> None:
        log = self._log_key(of, epoch)
        keep = StreamAddOptions(trim=TrimByMaxLen(exact=False, threshold=BATCHES_MAX))
        with self._connection("announce") as to:
            added = self._batch()
            added.xadd(log, [(MARKS_FIELD, batch)], keep)
            added.expire(log, self._settings.ttl_s)
            for answer in self._exec(to, added, 2):
                if isinstance(answer, GlideError):
                    raise _translated(answer, to.scrub)

    def announced(self, of: NamespaceName, epoch: int, after: Cursor | None) -> Announced:
        place = after if isinstance(after, _LogPlace) else _LogPlace(b"", 0)
        log = self._log_key(of, epoch)
        with self._connection("announce") as to:
            if place.idle >= IDLE_READS:
                newest = stream_entries(to.client.xrevrange(log, MaxId(), MinId(), 1))
                is_anew = bool(newest) and id_order(newest[0][0]) < id_order(place.last)
                place = _LogPlace(b"" if is_anew else place.last, 0)
            begin = ExclusiveIdBound(place.last) if place.last else MinId()
            entries = stream_entries(to.client.xrange(log, begin, MaxId(), BATCHES_AT_A_TIME))
        batch = b"".join(marks for _, marks in entries)
        place = _LogPlace(entries[-1][0], 0) if entries else place._replace(idle=place.idle + bool(place.last))
        return Announced(batch, place, len(entries) < BATCHES_AT_A_TIME)

    def drop_announced(self, of: NamespaceName, epoch: int) -> None:
        with self._connection("announce") as to:
            to.client.unlink([self._log_key(of, epoch)])

    def look(self, name: ChunkName) -> Head | None:
        with self._connection("note") as to, self._uncounted(to):
            value = bytes_of(to.client.getrange(self._key(name), 0, HEAD_BYTES_MAX - 1))
        return decode_of(name, value) if value else None

    def namespaces(self, tenant: str) -> Iterator[list[NamespaceName]]:
        for found in self._scanned((f"kv{FORMAT}", tenant), "*:note"):
            digests = [digest_from_text(pieces[0]) for _, pieces in found if len(pieces) == 2]
            yield [NamespaceName(tenant, digest) for digest in digests if digest is not None]

    def values(self, of: NamespaceName) -> Iterator[list[Listed]]:
        for found in self._scanned(of.pieces(), "*"):
            named = [(key, listed) for key, pieces in found if (listed := _listed(pieces)) is not None]
            yield [listed._replace(bytes=size) for (_, listed), size in self._sized(named) if size]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    # ---------------------------------------------------------------- names

    def _key(self, name: ChunkName) -> bytes:
        pieces = (*name.of.pieces(), f"{name.epoch:016x}", f"{{{text_of(name.key)}}}")
        return ":".join((*self._prefix(), *pieces, *([name.ranks] if name.ranks else []))).encode()

    def _fragment_key(self, name: ChunkName, head: Head, fragment: Fragment) -> bytes:
        return b"%s:%016x:%d" % (self._key(name), head.write, fragment.number)

    def _keys(self, name: ChunkName, head: Head) -> list[TEncodable]:
        return [self._key(name), *(self._fragment_key(name, head, fragment) for fragment in fragments_of(head))]

    def _note_key(self, name: NamespaceName) -> bytes:
        return ":".join((*self._prefix(), *name.pieces(), "note")).encode()

    def _log_key(self, of: NamespaceName, epoch: int) -> bytes:
        return ":".join((*self._prefix(), *of.pieces(), f"{epoch:016x}", "log")).encode()

    def _prefix(self) -> tuple[str, ...]:
        return (self._settings.prefix,) if self._settings.prefix else ()

    # ---------------------------------------------------------------- calls

    @contextmanager
    def _connection(self, kind: Kind) -> Iterator["_Connection"]:
        """A connection for one call. Errors of the library leave as StoreError, without secrets in them."""
        with self._lanes[kind].borrowed() as to:
            try:
                if self._password is not None:
                    to.use_password(self._password.current())
                yield to
                to.late_in_a_row = 0
            except GlideError as problem:
                to.note_failure(problem)
                # Not `from problem`: the library's text may quote what it sent.
                raise _translated(problem, to.scrub) from None

    def _learn_nodes(self, to: "_Connection") -> None:
        """Asks now and then which node has which keys. A cluster that does not tell is a single node to us."""
        now_s = time.monotonic()
        if self._settings.is_cluster and now_s - self._nodes_asked_s >= NODES_ASKED_EVERY_S:
            self._nodes_asked_s = now_s
            with suppress(GlideError):
                self._nodes = node_map(to.client.custom_command(["CLUSTER", "SLOTS"]))

    @contextmanager
    def _uncounted(self, to: "_Connection") -> Iterator[None]:
        """Calls inside do not count as use, so that a look at all values does not change what is evicted first.

        A Redis from before 7.2 does not know the command, and a user may lack the permission: then they count."""
        with suppress(glide.RequestError):
            self._everywhere(to, ["CLIENT", "NO-TOUCH", "ON"])
        yield
        with suppress(glide.RequestError):
            self._everywhere(to, ["CLIENT", "NO-TOUCH", "OFF"])

    def _everywhere(self, to: "_Connection", command: list[TEncodable]) -> None:
        """Sends a command to every node that this connection reaches."""
        if isinstance(to.client, GlideClusterClient):
            to.client.custom_command(command, AllNodes())
        else:
            to.client.custom_command(command)

    def _scanned(self, begin: Sequence[str], rest: str) -> Iterator[list[tuple[bytes, list[str]]]]:
        """Names that begin with these pieces: whole, and the pieces behind. One list for each call, of all masters."""
        beginning = "".join(f"{piece}:" for piece in (*self._prefix(), *begin))
        pattern = "".join(f"\\{letter}" if letter in GLOB else letter for letter in beginning) + rest
        cursor: Any = ClusterScanCursor() if self._settings.is_cluster else b"0"  # type: ignore[no-untyped-call]
        while True:
            with self._connection("note") as to:
                answer: Any = to.client.scan(cursor, match=pattern, count=SCANNED_AT_A_TIME)
                cursor, listed = listed_answers(answer, 2)
                keys = [bytes_of(key) or b"" for key in listed]
            yield [(key, key.decode(errors="replace")[len(beginning) :].split(":")) for key in keys]
            if cursor.is_finished() if self._settings.is_cluster else cursor == b"0":
                return

    def _sized(self, named: Sequence[tuple[bytes, Listed]]) -> Iterator[tuple[tuple[bytes, Listed], int]]:
        """Each with its value's bytes; 0 for one that is gone, or no text."""
        if not named:
            return
        with self._connection("note") as to:
            batch = self._batch()
            for key, _ in named:
                batch.strlen(key)
            with self._uncounted(to):
                answers = self._exec(to, batch, len(named))
            for one, answer in zip(named, answers, strict=True):
                if isinstance(answer, GlideError) and not str(answer).startswith(WRONG_TYPE):
                    raise _translated(answer, to.scrub)
                yield one, answer if isinstance(answer, int) else 0

    def _batch(self) -> Any:
        return ClusterBatch(is_atomic=False) if self._settings.is_cluster else Batch(is_atomic=False)

    def _exec(self, to: "_Connection", batch: Any, count: int) -> list[Any]:
        """One answer for each of the batch's `count` commands; errors are among them."""
        return listed_answers(to.client.exec(batch, raise_on_error=False), count)

    def _renew(self, batch: Any, name: ChunkName, head: Head) -> int:
        """Asks to renew the time to live of a head and its fragments, in the order of _keys(). False answers a key that
        is not there. Returns the number of commands."""
        first, *fragments = self._keys(name, head)
        batch.expire(first, self._settings.ttl_s)
        for key in fragments:
            batch.expire(key, self._settings.ttl_s + FRAGMENTS_OUTLIVE_S)
        return 1 + len(fragments)

    def _gather(self, head: Head, sources: Sources) -> memoryview:
        at = len(encode(head))
        whole = self._scratch.room(at + head.payload_bytes)
        whole[:at] = encode(head)
        for index, shard in enumerate(head.shards):
            sources.copy_to(whole[at : at + shard.payload_bytes], index)
            at += shard.payload_bytes
        return whole

    def _set_new(self, to: "_Connection", key: bytes, value: bytes | memoryview) -> bool:
        lives = ExpirySet(ExpiryType.SEC, self._settings.ttl_s)
        first = ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        return to.client.set(key, value, conditional_set=first, expiry=lives) is not None


class _Connection:
    """A client of the library. Its lane says how many threads may use it at a time."""

    def __init__(self, client: Client, secret: Secret | None) -> None:
        self.client = client
        self.calls = 0
        """Under way. Its lane alone writes it."""
        self.late_in_a_row = 0
        self.is_usable = True
        self._secret = secret

    def note_failure(self, problem: GlideError) -> None:
        """Gives the client up if it is closed or out of step, or if the connection may hang and not the server."""
        self.late_in_a_row = self.late_in_a_row + 1 if isinstance(problem, glide.TimeoutError) else 0
        is_lost = isinstance(problem, glide.ClosingError | OutOfStepError)
        self.is_usable = not is_lost and self.late_in_a_row < LATE_MAX

    def scrub(self, text: str) -> str:
        return text if self._secret is None else self._secret.scrub(text)

    def use_password(self, secret: Secret) -> None:
        if secret != self._secret:
            self._secret = secret
            self.client.update_connection_password(secret.reveal(), immediate_auth=True)


class _Scratch(threading.local):
    """Each thread's room for a value. It is not a connection's, so a thread copies while another has the connection."""

    def __init__(self) -> None:
        self._kept = memoryview(b"")

    def room(self, count: int) -> memoryview:
        """Its pages are kept: new ones cost more than copying into them."""
        if len(self._kept) < count:
            self._kept = memoryview(bytearray(max(count, HEAD_BYTES_MAX + SCRATCH_BYTES)))
        return self._kept[:count]


class _Lane:
    """Connections of one kind, each made when it is first needed. A call takes the one with the fewest under way."""

    def __init__(
        self,
        settings: Settings,
        password: CurrentSecret | None,
        deadline_s: float,
        connections: int,
        *,
        waits_s: float | None,
        calls: int = 1,
    ) -> None:
        """deadline_s: of a call. waits_s: how long a connection is waited for; None: until one is free. calls: how many
        may be under way on one connection.

        Calls end by their deadlines, and a chunk needs several. Whoever waits for its end learns nothing of a node."""
        self._settings = settings
        self._password = password
        self._deadline_s = deadline_s
        self._waits_s = waits_s
        self._connections_max = connections
        self._calls_max = calls
        self._is_closed = False
        self._connections: list[_Connection] = []
        self._making = 0
        """Connections that are being made."""
        self._changed = threading.Condition()

    @contextmanager
    def borrowed(self) -> Iterator[_Connection]:
        """Raises StoreError: no connection is free in time, or none can be made."""
        connection = self._taken() or self._made()
        try:
            yield connection
        finally:
            self._given_back(connection)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            idle = [connection for connection in self._connections if not connection.calls]
        for connection in idle:
            connection.client.close()

    def _taken(self) -> _Connection | None:
        """A connection for one more call; None: the caller is to make one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or self._has_room(), self._waits_s):
                raise StoreError("remote-slow", f"no connection was free within {self._waits_s} s")
            if self._is_closed:
                raise StoreError("remote-down", "closed")
            least = min(self._connections, key=lambda one: one.calls, default=None)
            if self._may_make() and (least is None or least.calls):
                self._making += 1
                return None
            assert least is not None
            least.calls += 1
            return least

    def _has_room(self) -> bool:
        return self._may_make() or any(one.calls < self._calls_max for one in self._connections)

    def _may_make(self) -> bool:
        return len(self._connections) + self._making < self._connections_max

    def _made(self) -> _Connection:
        connection = None
        try:
            connection = self._connect()
            return connection
        finally:
            with self._changed:
                self._making -= 1
                if connection is not None:
                    connection.calls = 1
                    self._connections.append(connection)
                self._changed.notify(self._calls_max)

    def _given_back(self, connection: _Connection) -> None:
        with self._changed:
            connection.calls -= 1
            if not connection.is_usable and connection in self._connections:
                self._connections.remove(connection)
            is_over = not connection.calls and (self._is_closed or not connection.is_usable)
            self._changed.notify(self._calls_max)
        if is_over:
            connection.client.close()

    def _connect(self) -> _Connection:
        settings = self._settings
        try:
            secret = self._password.current() if self._password is not None else None
        except ConfigError as problem:
            raise StoreError("remote-denied", problem.message) from problem
        try:
            client = _client(settings, secret, self._deadline_s)
        except (GlideError, OSError) as problem:
            raise _translated(problem, secret.scrub if secret is not None else str, otherwise="remote-down") from None
        return _Connection(client, secret)


def _client(settings: Settings, secret: Secret | None, deadline_s: float) -> Client:
    tls = TlsAdvancedConfiguration(root_pem_cacerts=Path(settings.ca_file).read_bytes()) if settings.ca_file else None
    credentials = None
    if secret is not None:
        credentials = ServerCredentials(password=secret.reveal(), username=settings.username or None)
    common: dict[str, Any] = {
        "addresses": [NodeAddress(host, port) for host, port in settings.addresses],
        "use_tls": settings.uses_tls,
        "credentials": credentials,
        "request_timeout": int(deadline_s * 1000),
        "reconnect_strategy": RECONNECT,
        "client_name": "kvserver",
    }
    connect_ms = int(settings.connect_s * 1000)
    if settings.is_cluster:
        cluster = AdvancedGlideClusterClientConfiguration(connection_timeout=connect_ms, tls_config=tls)
        return GlideClusterClient.create(GlideClusterClientConfiguration(**common, advanced_config=cluster))
    alone = AdvancedGlideClientConfiguration(connection_timeout=connect_ms, tls_config=tls)
    return GlideClient.create(GlideClientConfiguration(**common, advanced_config=alone))


# -------------------------------------------------------------------- answers


class _LogPlace(NamedTuple):
    """A place in a stream of announcements."""

    last: bytes
    """Id of the last entry that was read; empty: none yet."""
    idle: int
    """Reads since then that brought nothing."""


def _head(name: ChunkName, answer: Any, scrub: Scrub) -> Head | StoreError | WrongValue | None:
    if isinstance(answer, GlideError):
        if str(answer).startswith(WRONG_TYPE):
            return WrongValue("foreign", "a value of another type has this name")
        return _translated(answer, scrub)
    value = bytes_of(answer)
    if not value:
        return None
    try:
        return decode_of(name, value)
    except WrongValue as problem:
        return _without_frames(problem)


def _listed(pieces: Sequence[str]) -> Listed | None:
    """A name without its namespace: EPOCH:{KEY}[:RANKS][:WRITE:NUMBER]. Its size is not known yet."""
    match pieces:
        case [epoch_text, key_text, *rest] if len(rest) <= 3:
            epoch, key = epoch_from_text(epoch_text), digest_from_text(key_text.strip("{}"))
            ranks = rest[0] if len(rest) in (1, 3) else ""
            if epoch is not None and key is not None:
                return Listed(epoch, key, ranks, ":".join(rest[-2:]) if len(rest) > 1 else "", 0)
    return None


def _translated(problem: Exception, scrub: Scrub, *, otherwise: Problem = "remote-refused") -> StoreError:
    """An error of the library as one of ours, without the secret in it."""
    text = str(_without_frames(problem))
    code = otherwise
    if isinstance(problem, glide.TimeoutError):
        code = "remote-slow"
    elif isinstance(problem, glide.ConnectionError | glide.ClosingError | OutOfStepError):
        code = "remote-down"
    for word, meaning in MEANINGS.items():
        if word in text:
            code = meaning
            break
    return StoreError(code, scrub(text))


def _without_frames(problem: Failure) -> Failure:
    """An error whose frames would refer to it, and so form a cycle with the views of memory that a call was given.

    The library exports such views. Python 3.12 crashes when it collects a cycle with one that is exported."""
    return problem.with_traceback(None)


def _gathered(wanted: Sequence[tuple[Fragment, memoryview]]) -> Iterator[list[tuple[Fragment, memoryview]]]:
    """Fragments in groups of at most REPLY_BYTES_MAX, or one: a reply is one frame, and large frames are slow."""
    group: list[tuple[Fragment, memoryview]] = []
    total = 0
    for fragment, target in wanted:
        if group and total + fragment.bytes > REPLY_BYTES_MAX:
            yield group
            group, total = [], 0
        group.append((fragment, target))
        total += fragment.bytes
    if group:
        yield group
