"""A round trip to a remote store, for people who want to know whether it works: a chunk is written, read, and removed.

The chunk lies under a namespace of its own, drawn at random, so no server ever finds it.
"""

import os
import time
from statistics import median
from typing import NamedTuple

from kvserver.config.remotes import Remote
from kvserver.errors import DeviceError
from kvserver.movers.remote_checks import CheckedSources, digest_of
from kvserver.movers.remote_store import open_store
from kvserver.remote.announcement import WRITTEN, mark_of, pack
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, Shard, fragment_bytes_for
from kvserver.remote.store import Facts, Store, StoreError

PAYLOAD_BYTES = 4 << 20
PROBES = 9


class Trial(NamedTuple):
    facts: Facts
    probe_ms: float
    """The median time of a probe for one chunk."""
    write_gbps: float
    read_gbps: float


def attempt(remote: Remote) -> Trial:
    """Tries a store. Raises ConfigError, StoreError, or DeviceError if other bytes come back."""
    store = open_store(remote)
    try:
        return _round_trip(store, remote.tenant)
    finally:
        store.close()


def _round_trip(store: Store, tenant: str) -> Trial:
    name = ChunkName(NamespaceName(tenant, os.urandom(32)), int.from_bytes(os.urandom(8)), os.urandom(32))
    sent = memoryview(os.urandom(PAYLOAD_BYTES))
    shard = Shard(0, 0, PAYLOAD_BYTES, 0)
    shards = (shard._replace(digest=digest_of(name, shard, sent) or 0),)
    head = Head(
        namespace=name.of.namespace,
        key=name.key,
        parent=bytes(32),
        epoch=name.epoch,
        write=int.from_bytes(os.urandom(8)),
        written_s=int(time.time()),
        shards=shards,
        fragment_bytes=fragment_bytes_for(shards),
    )
    came = memoryview(bytearray(PAYLOAD_BYTES))
    facts = store.facts()
    store.notes([name.of])
    begin_s = time.monotonic()
    store.write(name, head, CheckedSources(name, head, [sent]))
    write_s = time.monotonic() - begin_s
    try:
        store.announce(name.of, name.epoch, pack([mark_of(name.of.namespace, name.epoch, name.key) | WRITTEN]))
        store.announced(name.of, name.epoch, None)
        store.touch(name, head)
        waits_s = []
        for _ in range(PROBES):
            begin_s = time.monotonic()
            (found,) = store.heads([name], len(shards))
            waits_s.append(time.monotonic() - begin_s)
            if isinstance(found, StoreError):
                raise found
            if found != head:
                raise DeviceError("remote-gone", "what was written is not there")
        begin_s = time.monotonic()
        store.read(name, head, [came])
        read_s = time.monotonic() - begin_s
    finally:
        store.drop(name, head)
        store.drop_announced(name.of, name.epoch)
    if came != sent:
        raise DeviceError("digest", "other bytes came back than were written")
    return Trial(facts, median(waits_s) * 1e3, PAYLOAD_BYTES / write_s / 1e9, PAYLOAD_BYTES / read_s / 1e9)
